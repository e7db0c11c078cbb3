"""Work for processes that may die, by a number: what it does depends on it; and a function's result in a child."""

import multiprocessing
import os
import resource
import sys
import time


def square(number: int) -> int:
    """The square; a number below 0 sends the process that signal, 13 ends it with exit code 13."""
    if number < 0:
        # An abort is expected here: it should not leave a core file in the working folder.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.kill(os.getpid(), -number)
    if number == 13:
        os._exit(13)
    return number * number


def process_of(number: int) -> int:
    """The process that works on it; slow enough for another to get some work too."""
    time.sleep(0.05)
    return os.getpid()


def main_module(number: int) -> str:
    """The file that this process was started with."""
    return str(sys.modules["__main__"].__file__)


def sleep_if_odd(number: int) -> int:
    """An odd number is not done before ten minutes are over."""
    time.sleep(600 * (number % 2))
    return number


def hold(mebibytes: int) -> int:
    """Takes that much memory, really."""
    return len(bytes(mebibytes << 20))


def result_in_child(function, *arguments, method: str = "fork"):
    """Return what ``function`` returns in a child process."""
    context = multiprocessing.get_context(method)
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send, args=(sender, function, arguments))
    child.start()
    sender.close()
    assert receiver.poll(60), "the child is silent"
    result = receiver.recv()
    child.join(60)
    assert child.exitcode == 0
    return result


def _send(sender, function, arguments):
    sender.send(function(*arguments))

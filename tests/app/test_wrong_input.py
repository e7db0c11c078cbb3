"""Wrong input of every command: one clear message with the words that a user needs, and the documented exit code.

Every case is a real command on real files; ``{d}`` is the folder of slides, ``{t}`` the folder around it.
"""

import shlex

import pytest

from app import synth
from tests.app.conftest import CLASSIFIER, ROOT
from tests.helpers.in_process import call
from tests.helpers.real import SVS

XML = ROOT / "tests" / "data" / "annotations" / "asap-polygon.xml"
HTML = b"<!DOCTYPE html><html><body>404 not found</body></html>"
LABELS = ("slide_0000,a", "slide_0001,b", "slide_0002,a", "slide_0003,b")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Four good slides."""
    folder = tmp_path_factory.mktemp("made")
    assert synth.main([str(folder), "--slides", "4", "--size", "1024", "--task", "classify"]) == 0
    return folder


def slides(folder, made, labels=LABELS):
    for path in made.glob("*.tif*"):
        (folder / path.name).hardlink_to(path)
    (folder / "labels.csv").write_text("\n".join(["slide,label", *labels, ""]))


def unlabelled(folder, made):
    slides(folder, made)
    (folder / "labels.csv").unlink()


def labelled(*labels):
    return lambda folder, made: slides(folder, made, labels)


def damaged(folder, made):
    """Four good slides and four bad files, labelled like them."""
    photo = next((ROOT / "data/nuclei/images").glob("*.png")).read_bytes()
    bad = {"cut.svs": SVS.read_bytes()[:900_000], "zero.svs": b"", "page.svs": HTML, "photo.svs": photo}
    slides(folder, made, (*LABELS, *(f"{name},a" for name in bad)))
    for name, content in bad.items():
        (folder / name).write_bytes(content)


def only_bad(folder, made):
    for name in ("bad0.svs", "bad1.svs"):
        (folder / name).write_bytes(HTML)
    (folder / "labels.csv").write_text("slide,label\nbad0,a\nbad1,b\n")


def nothing(folder, made):
    """An empty folder."""


def taken(folder, made):
    """The run folder's place is taken by a file, which no user, root included, can write into as a folder."""
    slides(folder, made)
    (folder.parent / "out").write_text("a file")


def held(folder, made):
    """The run folder holds a run."""
    slides(folder, made)
    (folder.parent / "out" / "checkpoints").mkdir(parents=True)
    (folder.parent / "out" / "checkpoints" / "last.pt").write_bytes(b"a checkpoint")


def declared(folder, made):
    (folder / "a.xml").write_text("<!DOCTYPE x><Annotations/>")
    (folder / "there.geojson").write_text("")


TRAIN = f"train --slides {{d}} --out {{t}}/out --model {CLASSIFIER} --tile 256 --batch 4 --steps 2 --validation-tiles=2"
PLAN = "plan --model resnet18 --tile 64"
V100 = f"{PLAN} --device-spec v100-16gb"
VERIFY = f"verify --model {CLASSIFIER} --tile 96 --batch 6"
BENCH = "bench --slides {d} --out {t}/out"
FOUR = f"{BENCH} --ranks 4 --stages"
PICTURES = f"{TRAIN} --pictures resize"
BAGS = f"{TRAIN} --bag 12 --batch 16"

CASES = [
    (nothing, TRAIN, 2, "no slide"),
    (nothing, TRAIN.replace("{d}", "{d}/nowhere"), 2, "nowhere"),
    (unlabelled, TRAIN, 2, "4. a sub-folder per class"),
    (labelled(*LABELS, "ghost,b"), TRAIN, 0, "ghost"),
    (labelled(*LABELS[:3]), f"{TRAIN} --validation 0", 0, "slide_0003"),
    (labelled("slide_0000,a", "slide_0001,a"), TRAIN, 2, "at least two classes"),
    (damaged, TRAIN, 0, "cut: failed at open", "the file is empty", "is HTML, not a slide", "photo: failed at open"),
    (only_bad, TRAIN, 1, "none of 2 slides can be used"),
    (slides, f"{TRAIN} --tile 4096", 1, "4096"),
    (slides, f"{TRAIN} --mpp 0.1", 1, "0.1"),
    (taken, TRAIN, 1, "cannot be written"),
    (held, TRAIN, 2, "already holds a run"),
    (slides, f"{TRAIN} --model resnet19", 2, "a ResNet has depth 18"),
    (slides, f"{TRAIN} --model unet_w4", 2, "choose a classification --model"),
    (slides, f"{TRAIN} --weights {{d}}/labels.csv", 2, "--weights"),
    (slides, f"{PICTURES} --mpp 1", 2, "--mpp says nothing of --pictures resize"),
    (slides, f"{PICTURES} --tile slide", 2, "--pictures resize needs a --tile"),
    (slides, f"{PICTURES} --augment cpu", 2, "--augment cpu is for tiles"),
    (slides, f"{PICTURES} --task segment", 2, "--pictures resize gives each picture one class"),
    (slides, f"{BAGS} --sample class --slide-score max", 2, "use --batch 24", "--sample class", "--slide-score max"),
    (slides, f"{BAGS} --parallel fsdp --ranks 2", 2, "--batch 16: use --batch 24", "--parallel fsdp"),
    (nothing, f"{BENCH}/nowhere --slides {{d}}/nowhere", 2, "nowhere does not exist"),
    (slides, f"{BENCH} --steps 2", 2, "--steps must be at least 3"),
    (slides, f"{BENCH} --ranks 2 2", 2, "each once; got 2 2"),
    (slides, f"{BENCH} --strategies ddp dpp", 2, "got 'dpp'"),
    (slides, f"{FOUR} 2 3", 2, "--stages takes numbers of 2 or more that divide one of --ranks 4; got 3"),
    (slides, f"{BENCH} --stages 1", 2, "got 1"),
    (slides, f"{BENCH} --stages 2 2", 2, "--stages takes one or more, each once; got 2 2"),
    (slides, f"{BENCH} --memory 2GB", 2, "--memory takes a size"),
    (slides, f"{BENCH} --microbatches 9", 2, "--microbatches must be 1 to --batch 8"),
    (slides, f"{BENCH} --ranks 1 --strategies ddp", 2, "nothing to measure"),
    (slides, f"{BENCH} --strategies ddp spatial@2y1", 2, "spatial@2y1: a grid is ROWSxCOLUMNS"),
    (slides, f"{BENCH} --strategies ddp spatial@", 2, "spatial@: a grid is ROWSxCOLUMNS"),
    (slides, f"{BENCH} --strategies ddp@2x1", 2, "--strategies ddp@2x1: ddp has no teams"),
    (slides, f"{BENCH} --strategies spatial@1x1 ddp", 2, "spatial@1x1 divides nothing"),
    (slides, f"{BENCH} --strategies spatial@2x2 ddp", 2, "its teams take 4, 8, 12 ... ranks; got --ranks 1 2: add"),
    (slides, f"{BENCH} --strategies ddp 1f1b@2x1 --ranks 2", 2, "its teams take 4, 6, 8 ... ranks; got --ranks 2: add"),
    (nothing, "predict --slides {d} --checkpoint {d} --out {t}/out", 2, "RUN/checkpoints/best.pt or last.pt"),
    (nothing, "doctor --slides {d}", 2, "holds no slide"),
    (nothing, "index --slides {d}", 2, "holds no slide"),
    (
        slides,
        "index --slides {d} --tile 0 --slide-mpp 500 --workers -1",
        *(2, "--tile is at least 1 px, or slide; got 0", "got 500", "--workers must be at least 0; got -1"),
    ),
    (taken, "index --slides {d} --out {t}/out/run", 1, "out"),
    (slides, "index --slides {d} --scene -1", 2, "--scene counts the images of a slide file from 0; got -1"),
    (slides, "index --slides {d} --part 3/2", 2, "--part is one of several parts"),
    (slides, "index --slides {d} --part 1/2 --annotations {d}", 2, "not made with --part or --pictures resize"),
    (slides, "index --slides {d} --annotations {d}/nowhere", 2, "must be a folder of annotation files"),
    (
        nothing,
        "synth {d} --slides 0 --size 511 --mpp 20",
        2,
        "--slides must be at least 1",
        "--size is 512 to",
        "--mpp is 0.05 to below 20 um/px",
    ),
    (taken, "synth {t}/out --slides 1 --size 600", 1, "cannot be written"),
    (nothing, "convert {d}/nowhere {t}/out", 2, "nowhere is none. Check the path"),
    (
        declared,
        "convert {d}/a.svs {d}/there.geojson --mpp 1",
        *(2, "IN must end in .geojson", "a.svs is none", "there.geojson does. Remove it", "--mpp is the resolution"),
    ),
    (declared, "convert {d}/a.xml {t}/a.geojson", 1, "declares a document type ('x')"),
    (nothing, f"convert {XML} {{t}}/a.tif", 2, "a.tif: a mask covers a slide: give --slide FILE"),
    (nothing, f"convert {XML} {{t}}/a.xml", 2, "OUT must end in .geojson"),
    (nothing, f"convert {XML} {{t}}/a.json --to .geojson", 2, "--to is for a folder"),
    (taken, "convert {d} {t}/out --slide {t}/out", 2, "as --to .geojson", "out is a file", "--slide must be a folder"),
    (nothing, "convert {d} {t}/new --to .tif", 2, "a mask covers a slide: give --slide FOLDER"),
    (nothing, "convert {d} {t}/new --to .geojson", 2, "IN holds no annotation file"),
    (slides, "evaluate --predictions {d} --labels {d}/labels.csv", 2, "holds no predictions"),
    (nothing, "evaluate --predictions {d}", 2, "give --labels FILE.csv, --annotations DIR, or both"),
    (nothing, "report {d}", 1, "config.yaml is missing"),
    (nothing, "report {d}/nowhere", 1, "does not exist"),
    (nothing, "report", 2, "none was given"),
    (nothing, f"{PLAN} --device-spec v100-16g", 2, "v100-16gb"),
    (nothing, f"{PLAN} --host-memory lots", 2, "--host-memory takes a size"),
    (nothing, f"{PLAN} --ranks 0", 2, "--ranks must be at least 1; got 0"),
    (nothing, f"{PLAN} --tile 0", 2, "--tile must be at least 1"),
    (nothing, f"{V100} --ranks 4 --stages 3", 2, "divide --ranks 4"),
    (nothing, f"{V100} --ranks 2 --parallel single", 2, "--parallel single uses one process; got --ranks 2"),
    (nothing, f"{V100} --parallel ddp", 2, "--parallel ddp takes 2 ranks or more; got --ranks 1"),
    (
        nothing,
        f"{V100} --ranks 4 --parallel ddp --stages 2 --microbatches 2",
        *(2, "--parallel ddp has one stage: leave --stages 2 out", "got --microbatches 2 and --ranks 4"),
    ),
    (nothing, f"{V100} --microbatches 16 --batch 8", 2, "--microbatches must be 1 to --batch 8; got 16"),
    (nothing, f"{V100} --link nvlink9", 2, "nvlink4"),
    (nothing, f"{V100} --model resnet19x", 2, "resnet"),
    (nothing, f"{V100} --precision bf16", 2, "--precision bf16"),
    (nothing, f"{PLAN} --precision fp16", 2, "--precision fp16 is for --device-spec"),
    (nothing, f"{PLAN} --precision tf32", 2, "--precision tf32 needs a GPU"),
    (nothing, f"{PLAN} --link nvlink2", 2, "--device-spec"),
    (nothing, f"{PLAN} --network ndr-infiniband", 2, "--network is about a machine described by --device-spec"),
    (nothing, f"{VERIFY} --communicator mpi", 2, "--communicator mpi does not fit ranks started by nothing"),
    (nothing, f"{VERIFY} --precision bf16 --steps 0", 2, "--steps must be at least 1; got 0"),
    (nothing, f"{VERIFY} --precision tf32", 2, "--precision tf32 rounds far more than strategies differ"),
    (nothing, f"{VERIFY} --parallel gpipe --ranks 2 --cuts=nowhere", 2, "nowhere"),
    (nothing, f"{VERIFY} --ranks 2", 2, "name the strategy to verify"),
    (nothing, f"{VERIFY} --parallel fsdp --ranks 2 --communicator threads", 2, "fsdp talks over torch.distributed"),
    (nothing, f"{VERIFY} --recompute optimal", 2, "--recompute optimal is planned for a memory"),
]


@pytest.mark.parametrize(
    ("make", "command", "code", "words"),
    [
        pytest.param(make, command, code, words, id=f"{command.split()[0]}-{words[0]}")
        for make, command, code, *words in CASES
    ],
)
def test_wrong_input_has_one_clear_message_and_its_exit_code(make, command, code, words, made, tmp_path):
    (tmp_path / "slides").mkdir()
    make(tmp_path / "slides", made)
    module, *arguments = shlex.split(command.format(d=tmp_path / "slides", t=tmp_path))
    done = call(f"app.{module}", *arguments, env={"COLUMNS": "200"}, code=code)
    said = done.stdout + done.stderr
    for word in words:
        assert word in said
    assert "Traceback" not in said

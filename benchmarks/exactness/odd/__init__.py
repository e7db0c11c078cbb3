"""Small models as users write them, each with one thing that makes splitting it hard.

Each takes the number of classes and gives a module for images (n, 3, 32, 32), as ``--model package.module:factory``
asks: ``sharing`` has weights used more than once, ``state`` buffers and frozen parts, ``flow`` control flow, hooks and
contexts, ``values`` what passes between modules.
"""

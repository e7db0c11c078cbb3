import errno
import importlib.metadata
import os
import shutil

import numpy as np
import pytest
import tifffile
import torch

from app import doctor as host_check
from app.checks import slides as slide_check
from app.checks.slides import check_libraries, check_slide, check_slides
from app.doctor import check_run_folder, check_versions, main
from pipelines.catalog.catalog import SlideSpec
from pipelines.slides.slide import SlideError
from tests.helpers.dying_slide import DyingSpec
from tests.helpers.real import SVS
from tests.helpers.two_scenes import write_two_scenes


def states(findings):
    return {finding.name: finding.state for finding in findings}


def found(findings, name):
    return next(finding.text for finding in findings if finding.name == name)


def test_a_damaged_tile_is_found(tmp_path):
    data = bytearray(SVS.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 4000] = bytes(4000)
    (tmp_path / "damaged.svs").write_bytes(data)
    (fault,) = check_slide(SlideSpec("damaged", tmp_path / "damaged.svs")).faults
    assert "cannot be read" in fault
    assert "\n" not in fault


def test_samples_that_are_not_read_are_a_fault_and_planes_are_named(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 255, (512, 512, 3), np.uint8)
    kept = {"tile": (256, 256), "resolution": (2e4, 2e4), "resolutionunit": "CENTIMETER", "photometric": "rgb"}
    for name, planes in (("int8", pixels.view(np.int8)), ("focal", np.stack([pixels] * 5)), ("good", pixels)):
        tifffile.imwrite(tmp_path / f"{name}.tif", planes, metadata=None, **kept)
    with tifffile.TiffWriter(tmp_path / "ome.tif", ome=True) as file:
        sizes = {"PhysicalSizeX": 0.5, "PhysicalSizeXUnit": "µm", "PhysicalSizeY": 0.5, "PhysicalSizeYUnit": "µm"}
        file.write(np.stack([pixels] * 5), tile=(256, 256), photometric="rgb", metadata={"axes": "ZYXS", **sizes})
    checks = {name: check_slide(SlideSpec(name, tmp_path / f"{name}.tif")) for name in ("int8", "focal", "good", "ome")}
    assert (checks["good"].faults, checks["good"].other_images) == ((), ())
    assert "signed" in checks["int8"].faults[0]
    assert "5 images of similar size" in checks["focal"].faults[0]
    assert (checks["ome"].faults, checks["ome"].other_images) == ((), ("4 more focal planes or times",))


def test_scenes_are_refused_until_one_is_chosen_and_the_others_are_listed(tmp_path):
    write_two_scenes(tmp_path / "two.tif")
    (fault,) = check_slide(SlideSpec("two", tmp_path / "two.tif")).faults
    assert "0: 512 x 512 px, 1: 640 x 512 px" in fault
    assert "--scene N" in fault
    check = check_slide(SlideSpec("two", tmp_path / "two.tif", scene=1))
    assert (check.faults, check.width, check.other_images) == ((), 640, ("512 x 512 px",))


def test_other_images_that_cannot_be_listed_are_a_fault(monkeypatch):
    def silent(path, scene):
        raise SlideError("no answer within 30 s")

    monkeypatch.setattr(slide_check, "other_images", silent)
    check = check_slide(SlideSpec("cmu", SVS))
    assert (check.faults, check.backend, check.other_images) == (("no answer within 30 s",), "tiled", ())


def test_a_slide_that_ends_its_process_costs_only_itself(in_processes):
    dying = DyingSpec("dying", SVS)
    checks = {check.slide_id: check for check in check_slides([dying, SlideSpec("cmu", SVS)], workers=1)}
    assert checks["cmu"].faults == ()
    assert "SIGABRT" in checks["dying"].faults[0]


def test_run_folder_is_tried_where_it_would_be_made(tmp_path, monkeypatch):
    findings = list(check_run_folder(tmp_path / "a" / "b"))
    assert [finding.name for finding in findings] == ["run folder", "write speed", "free space"]
    assert "FAULT" not in states(findings).values()
    assert str(tmp_path) in found(findings, "run folder")
    assert list(tmp_path.iterdir()) == []

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    (finding,) = check_run_folder(tmp_path)
    assert (finding.state, "No space left" in finding.text) == ("FAULT", True)
    (tmp_path / "file").write_text("")
    (finding,) = check_run_folder(tmp_path / "file" / "run")
    assert (finding.state, "is a file" in finding.text) == ("FAULT", True)


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["numpy>=2.0", "no-such>=1", "x; extra == 'dev'"])
    megatile = {"version": "0.1.0", "commit": None, "changed": None}
    environment = {"megatile": megatile, "python": "3.11.7", "os": "Linux", "packages": {"numpy": "2.4.0"}}
    findings = list(check_versions(environment | {"openslide_library": None}))
    assert found(findings, "missing") == "no-such: pip install no-such"
    assert states(findings)["openslide"] == "FAULT"


def test_slide_libraries_that_cannot_be_imported_are_named(monkeypatch):
    monkeypatch.setattr(slide_check, "LIBRARIES", ("zarr", "no_such_library"))
    findings = list(check_libraries())
    assert states(findings) == {"zarr": "ok", "no_such_library": "FAULT"}
    assert found(findings, "no_such_library").startswith("ModuleNotFoundError: No module named 'no_such_library'; ")


def test_without_mpi_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(host_check, "output_of", lambda command: None)
    monkeypatch.setattr(host_check, "package_version", lambda name: None)
    launcher = {"found": {"torchrun": True, "mpirun": False, "srun": False}, "started_by": None, "variables": {}}
    findings = list(host_check.check_launchers({"launcher": launcher}))
    assert states(findings)["mpi4py"] == states(findings)["mpirun"] == "note"
    assert "megatile[mpi]" in found(findings, "mpi4py")


def test_a_gpu_that_torch_has_no_kernels_for_is_a_fault(monkeypatch):
    monkeypatch.setattr(torch, "ones", lambda *_, **__: pytest.fail("computed on it"))
    gpu = {"name": "V100", "memory_bytes": 16 << 30, "bf16": False, "missing_kernels": "GPU 0 needs cu126"}
    cpu = {"model": "a CPU", "cores": 1, "cores_of_machine": 1}
    findings = list(host_check.check_devices({"cpu": cpu, "gpus": [gpu], "driver": "580", "cuda": "13.0"}))
    assert states(findings)["gpu 0"] == "FAULT"
    assert "cu126" in found(findings, "gpu 0")
    assert "bf16 no" in found(findings, "gpu 0")


def test_command_with_good_and_bad_slides(tmp_path, capsys):
    slides = tmp_path / "slides"
    slides.mkdir()
    shutil.copy(SVS, slides / "good.svs")
    (slides / "page.svs").write_text("<!DOCTYPE html><title>404</title>")
    (slides / "empty.svs").write_bytes(b"")
    assert main(["--slides", str(slides), "--out", str(tmp_path / "run")]) == 1
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line for line in lines[lines.index(f"Slides in {slides}") + 2 :] if line.strip()}
    assert rows["good"].split()[1:7] == ["tiled", "0.499", "2220", "x", "2967", "1"]
    assert "'macro'" in rows["good"]
    assert "content is HTML" in rows["page"]
    assert "empty" in rows["empty"]
    assert lines[-1] == "2 faults"
    assert not any(set(line) & set("│─┃━╭╰") for line in lines)


def test_command_without_slides(tmp_path, capsys):
    assert main(["--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("\n0 faults\n")


def test_a_slide_without_mpp_has_its_size_and_levels(tmp_path, capsys):
    slides = tmp_path / "slides"
    slides.mkdir()
    (slides / "bare.svs").write_bytes(SVS.read_bytes().replace(b"|MPP = 0.4990", b"|XXX = 0.4990"))
    arguments = ["--slides", str(slides), "--out", str(tmp_path / "run")]

    def row():
        return next(line for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["bare"])

    assert main(arguments) == 1
    found = row()
    assert found.split()[1:7] == ["tiled", "–", "2220", "x", "2967", "1"]
    assert "does not record its um/px" in found
    (tmp_path / "mpp.csv").write_text("slide,mpp\nbare,0.5\n")
    main([*arguments, "--mpp-table", str(tmp_path / "mpp.csv")])
    words = row().split()
    assert words[1:7] == ["tiled", "0.5", "2220", "x", "2967", "1"]
    assert words[-1] == "none"

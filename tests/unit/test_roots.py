"""Paths that come over the network: only folders inside allowed roots, whatever links and spellings say."""

import os
import re
from pathlib import Path

import pytest

from interleaf.errors import AdapterRejected, ConfigError
from interleaf.server.roots import AdapterRoots


@pytest.fixture
def world(tmp_path: Path) -> Path:
    """allowed/{good,linked_in,linked_out,inner_link_out,fifo,loop}, second/other, outside/secret."""
    for folder in ("allowed/good", "allowed/inner_link_out", "allowed/fifo", "second/other", "outside/secret"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "adapter_config.json").write_text("{}")
    allowed = tmp_path / "allowed"
    (allowed / "linked_in").symlink_to("good")
    (allowed / "linked_out").symlink_to(tmp_path / "outside" / "secret")
    (allowed / "loop").symlink_to("loop")
    (allowed / "file").write_text("x")
    (allowed / "inner_link_out" / "adapter_model.safetensors").symlink_to(
        tmp_path / "outside/secret/adapter_config.json"
    )
    os.mkfifo(allowed / "fifo" / "adapter_model.safetensors")
    (tmp_path / "allowed-evil").mkdir()
    return tmp_path


def roots(world: Path, **settings: bool) -> AdapterRoots:
    return AdapterRoots([str(world / "second")], str(world / "allowed"), **settings)


def refused(roots: AdapterRoots, source: str) -> str:
    with pytest.raises(AdapterRejected) as caught:
        roots.resolve(source)
    return "; ".join(caught.value.problems)


def test_folders_inside_a_root_are_resolved_whether_relative_absolute_or_linked(world: Path) -> None:
    good = str((world / "allowed/good").resolve())
    assert roots(world).resolve("good") == good
    assert roots(world).resolve("./good/") == good
    assert roots(world).resolve(str(world / "allowed/good")) == good
    assert roots(world).resolve("linked_in") == good
    assert roots(world).resolve(str(world / "second/other")) == str((world / "second/other").resolve())


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("../outside/secret", "holds '..'"),
        ("good/../../outside/secret", "holds '..'"),
        ("..\\outside", "holds '..'"),
        ("{world}/outside/secret", "outside the allowed folders"),
        ("{world}/allowed-evil", "outside the allowed folders"),
        ("/etc", "outside the allowed folders"),
        ("/proc/self/root/etc", "outside the allowed folders"),
        ("linked_out", "outside the allowed folders"),
        ("inner_link_out", "'adapter_model.safetensors' in it is a link to outside"),
        ("fifo", "neither a file nor a folder"),
        ("http://169.254.169.254/latest/meta-data", "URL"),
        ("file:///etc/passwd", "URL"),
        ("hf:org/name", "scheme"),
        ("good\x00.txt", "control characters"),
        ("good\n", "control characters"),
        ("\u202egood", "cannot be printed"),
        ("", "the path is empty"),
        ("   ", "the path is empty"),
        ("~/good", "'~' is not expanded"),
        ("a" * 5000, "5000 characters"),
        ("a" * 300, "cannot be resolved|nothing is there"),
        ("loop", "cannot be resolved|nothing is there"),
        ("missing", "nothing is there"),
        ("file", "a folder is wanted"),
        (".", "an allowed folder itself"),
        ("{world}/allowed", "an allowed folder itself"),
        ("dummy:r=16,targets=all", "random adapters are not allowed"),
    ],
)
def test_everything_else_is_refused_and_the_reason_given(world: Path, source: str, reason: str) -> None:
    assert re.search(reason, refused(roots(world), source.replace("{world}", str(world))))


def test_every_reason_is_given_at_once(world: Path) -> None:
    reasons = refused(roots(world), "http://x/../\x01")
    assert "URL" in reasons
    assert "'..'" in reasons
    assert "control characters" in reasons


def test_outside_the_roots_nobody_learns_what_exists(world: Path) -> None:
    there, missing = (refused(roots(world), f"{world}/outside/{name}") for name in ("secret", "nothing"))
    assert there == missing


def test_without_roots_nothing_is_read_and_without_a_base_nothing_relative(world: Path) -> None:
    assert "no folder is allowed here" in refused(AdapterRoots([]), str(world / "allowed/good"))
    no_base = AdapterRoots([str(world / "allowed")])
    assert "needs adapters_dir" in refused(no_base, "good")
    assert no_base.resolve(str(world / "allowed/good"))


def test_random_adapters_are_an_option(world: Path) -> None:
    assert roots(world, allow_dummy=True).resolve("dummy:r=4,seed=1") == "dummy:r=4,seed=1"


def test_a_root_must_be_a_folder_and_not_the_whole_file_system(world: Path) -> None:
    with pytest.raises(ConfigError, match="allow_adapter_root must be a folder that exists, got '/nowhere'"):
        AdapterRoots(["/nowhere"])
    with pytest.raises(ConfigError, match="adapters_dir must be a folder"):
        AdapterRoots([], str(world / "allowed/file"))
    with pytest.raises(ConfigError, match="root of the file system"):
        AdapterRoots(["/"])

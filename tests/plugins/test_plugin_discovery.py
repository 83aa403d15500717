"""What is found from metadata alone."""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
import tomllib
from pathlib import Path

from throwaway import Site, good

from deepinfer_core.plugins import Candidate, discover
from deepinfer_core.plugins.discovery import BUILTINS, SOURCE_TREE


def strangers(site: Site, *more: Path) -> list[Candidate]:
    found = discover([str(site.root), *map(str, more)]).candidates
    return [candidate for candidate in found if not candidate.builtin]


def test_a_plugin_is_found_without_importing_it(site: Site) -> None:
    folder = site.install("acme", "raise RuntimeError('imported')")
    (found,) = strangers(site)
    assert (found.name, found.distribution, found.version, found.entry_point, found.path, found.editable) == (
        "acme",
        "acme-dist",
        "1.0",
        "acme_dist_plugin",
        str(folder),
        False,
    )
    assert "acme_dist_plugin" not in sys.modules


def test_candidates_are_sorted_by_name_whatever_the_folder_order(site: Site) -> None:
    for name in ("zeta", "alpha", "mid"):
        site.install(name, good(name))
    assert [c.name for c in strangers(site)] == ["alpha", "mid", "zeta"]


def test_another_interface_major_is_named_and_not_imported(site: Site) -> None:
    site.install("future", "raise RuntimeError('imported')", group="deepinfer.plugins.v2")
    found = discover([str(site.root)])
    (failure,) = found.failures
    assert (failure.name, failure.distribution, failure.stage) == ("future", "future-dist", "version")
    assert "v2" in failure.cause
    assert "deepinfer.plugins.v1" in failure.cause
    assert not [c for c in found.candidates if c.name == "future"]


def test_both_majors_in_one_distribution_is_no_failure(site: Site) -> None:
    site.module("both", good("both"))
    folder = site.metadata("both-dist", {"both": "both"})
    with (folder / "entry_points.txt").open("a") as file:
        file.write("[deepinfer.plugins.v2]\nboth = both_v2\n")
    assert [c.entry_point for c in strangers(site)] == ["both"]
    assert discover([str(site.root)]).failures == ()


def test_an_unrelated_group_is_ignored(site: Site) -> None:
    site.install("other", good("other"), group="someone.elses")
    assert strangers(site) == []


def test_stale_egg_info_first_on_the_path_does_not_hide_the_good_install(site: Site, tmp_path: Path) -> None:
    site.install("acme", good("acme"), version="2.0")
    early = tmp_path / "early"
    site.metadata("acme-dist", {"old": "acme_dist_plugin"}, version="0.1", form="egg-info", root=early)
    stdlib = importlib.metadata.distributions(path=[str(early), str(site.root)])
    assert next(iter(stdlib)).version == "0.1", "the trap: the standard library meets the stale folder first"
    (found,) = discover([str(early), str(site.root)]).candidates[:1]
    assert (found.name, found.version) == ("acme", "2.0")
    assert found.duplicates == (str(early / "acme_dist.egg-info"),)


def test_stale_egg_info_does_not_double_the_plugin(site: Site, tmp_path: Path) -> None:
    site.install("acme", good("acme"))
    site.metadata("acme-dist", {"acme": "acme_dist_plugin"}, form="egg-info", root=tmp_path / "late")
    assert len(strangers(site, tmp_path / "late")) == 1


def test_an_importable_egg_info_wins_over_a_dist_info_whose_package_is_gone(site: Site) -> None:
    site.metadata("acme-dist", {"acme": "gone_package.plugin"}, version="1.0")
    site.install("acme", good("acme"), version="0.9", form="egg-info")
    (found,) = strangers(site)
    assert found.version == "0.9"


def test_the_same_folder_through_a_link_counts_once(site: Site, tmp_path: Path) -> None:
    site.install("acme", good("acme"))
    (tmp_path / "lib64").symlink_to(site.root)
    (found,) = strangers(site, tmp_path / "lib64")
    assert found.duplicates == ()


def test_a_copy_in_lib64_is_a_duplicate_not_a_second_plugin(site: Site, tmp_path: Path) -> None:
    site.install("acme", good("acme"))
    shutil.copytree(site.root, tmp_path / "lib64")
    (found,) = strangers(site, tmp_path / "lib64")
    assert len(found.duplicates) == 1


def test_an_editable_install_is_marked(site: Site) -> None:
    folder = site.install("acme", good("acme"))
    (folder / "direct_url.json").write_text('{"url": "file:///src", "dir_info": {"editable": true}}')
    assert strangers(site)[0].editable is True


def test_metadata_of_a_removed_package_is_stale(site: Site) -> None:
    site.metadata("ghost-dist", {"ghost": "ghost_package.plugin"})
    (failure,) = discover([str(site.root)]).failures
    assert failure.stage == "stale"
    assert "'ghost_package' is not installed" in failure.cause


def test_an_empty_folder_left_by_an_uninstall_is_stale_too(site: Site) -> None:
    (site.root / "leftover" / "__pycache__").mkdir(parents=True)
    site.metadata("left-dist", {"left": "leftover.plugin"})
    (failure,) = discover([str(site.root)]).failures
    assert "'leftover.plugin'" in failure.cause


def test_a_namespace_package_that_is_there_is_not_stale(site: Site) -> None:
    site.module("space.plugin", good("space"))
    site.metadata("space-dist", {"space": "space.plugin"})
    assert [c.name for c in strangers(site)] == ["space"]


def test_a_name_declared_twice_in_one_distribution_is_refused(site: Site) -> None:
    site.module("first", good("twice"))
    folder = site.metadata("twice-dist", {"twice": "first"})
    with (folder / "entry_points.txt").open("a") as file:
        file.write("twice = first:other\n")
    found = discover([str(site.root)])
    assert [f.stage for f in found.failures] == ["duplicate"]
    assert strangers(site) == []


def test_a_name_users_could_not_write_is_refused(site: Site) -> None:
    site.module("spaced", good("a name"))
    site.metadata("spaced-dist", {"a name": "spaced"})
    (failure,) = discover([str(site.root)]).failures
    assert "use letters" in failure.cause


def test_a_folder_without_a_name_is_skipped(site: Site) -> None:
    folder = site.install("acme", good("acme"))
    (folder / "METADATA").unlink()
    assert strangers(site) == []


def test_a_source_tree_offers_the_cores_own_plugins(site: Site) -> None:
    found = discover([str(site.root)]).candidates
    assert {c.name: c.entry_point for c in found} == BUILTINS
    assert {c.distribution for c in found} == {SOURCE_TREE}


def test_the_source_tree_table_says_what_the_package_metadata_says() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["deepinfer.plugins.v1"] == BUILTINS


def test_an_installed_core_is_read_from_its_metadata(site: Site) -> None:
    site.metadata("deepinfer-core", {"reference": "deepinfer_core.reference.plugin"}, version="9.9")
    assert [(c.name, c.version, c.builtin) for c in discover([str(site.root)]).candidates] == [
        ("reference", "9.9", True)
    ]

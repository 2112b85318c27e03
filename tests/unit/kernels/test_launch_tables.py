"""Launch tables: the choice of a table and a row, and invalid tables."""

import json
from pathlib import Path

import pytest

from baton.common.errors import ConfigurationError
from kernels.triton.launch import TABLES_FOLDER, AttentionLaunch, load_launch_table

DEFAULT = json.loads((TABLES_FOLDER / "default.json").read_text())
ATTENTION = {"block_m": 16, "block_n": 32, "num_warps": 4, "num_stages": 2}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "default.json").write_text(json.dumps(DEFAULT))
    return tmp_path


def add_table(folder: Path, devices, **kernels):
    (folder / "some.json").write_text(json.dumps({"devices": devices, **kernels}))


def test_the_checked_in_tables_can_be_used_and_name_each_device_once():
    paths = sorted(TABLES_FOLDER.glob("*.json"))
    devices = [name for path in paths for name in json.loads(path.read_text()).get("devices", [])]
    assert len(devices) == len(set(devices)) > 0
    for name in (*devices, "cpu", "Some GPU"):
        load_launch_table(name)


def test_hopper_cards_have_their_own_table():
    default = load_launch_table("cpu")
    for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA H100 PCIe"):
        assert load_launch_table(name).prefill_attention != default.prefill_attention


def test_the_first_row_that_is_large_enough_is_used(folder):
    rows = [{**ATTENTION, "up_to": 128}, {**ATTENTION, "up_to": 256, "block_n": 64}, ATTENTION]
    add_table(folder, ["Some"], prefill_attention=rows)
    table = load_launch_table("Some GPU", folder).prefill_attention
    assert [table.for_size(size) for size in (1, 128, 129, 256, 257, 10**9)] == [
        AttentionLaunch(**rows[index]) for index in (0, 0, 1, 1, 2, 2)
    ]


def test_the_longest_prefix_of_a_name_selects_the_table_and_the_default_completes_it(folder):
    add_table(folder, ["GPU 1", "Other"], row_norm=[{"num_warps": 2}])
    other = {"devices": ["GPU 100"], "row_norm": [{"num_warps": 32}]}
    (folder / "other.json").write_text(json.dumps(other))
    default = load_launch_table("GPU 2", folder)
    for name, num_warps in {"GPU 1": 2, "GPU 10": 2, "GPU 100 PCIe": 32, "Other": 2}.items():
        table = load_launch_table(name, folder)
        assert table.row_norm.for_size(1).num_warps == num_warps
        assert table.decode_attention == default.decode_attention


def test_a_device_turns_single_mechanisms_on_and_off(folder):
    add_table(folder, ["GPU"], mechanisms={"few_row_products": True})
    default = load_launch_table("cpu", folder).mechanisms
    changed = load_launch_table("GPU", folder).mechanisms
    assert (default.few_row_products, changed.few_row_products) == (False, True)
    assert changed.dependent_launch == default.dependent_launch


@pytest.mark.parametrize(
    ("kernels", "message"),
    [
        ({"sorting": []}, r"some\.json: sorting is unknown: it must be one of decode_attention"),
        ({"row_norm": []}, r"some\.json: row_norm must be a list of rows"),
        ({"row_norm": {"num_warps": 4}}, "row_norm must be a list"),
        ({"row_norm": [4]}, r"row_norm\[0\] is 4: it must be an object"),
        ({"row_norm": [{}]}, r"row_norm\[0\]\.num_warps is missing"),
        ({"row_norm": [{"num_warps": 4, "block_n": 16}]}, r"row_norm\[0\]\.block_n is unknown"),
        ({"row_norm": [{"num_warps": 0}]}, "num_warps is 0: it must be a whole number of 1 to 32"),
        ({"row_norm": [{"num_warps": 64}]}, "num_warps is 64: .* of 1 to 32"),
        ({"row_norm": [{"num_warps": 6}]}, "num_warps is 6: it must be a power of two"),
        ({"row_norm": [{"num_warps": True}]}, "num_warps is True"),
        ({"row_norm": [{"num_warps": "4"}]}, "num_warps is '4'"),
        ({"row_norm": [{"num_warps": 4, "up_to": None}]}, "up_to is None"),
        ({"row_norm": [{"num_warps": 4, "up_to": 8}]}, r"row_norm\.up_to must rise, and the last"),
        ({"row_norm": [{"num_warps": 4}, {"num_warps": 4}]}, r"row_norm\.up_to must rise"),
        (
            {"row_norm": [{"num_warps": 4, "up_to": size} for size in (8, 8)] + [{"num_warps": 4}]},
            r"row_norm\.up_to must rise",
        ),
        ({"prefill_attention": [{**ATTENTION, "block_m": 8}]}, "block_m is 8: .* of 16 to"),
        (
            {"decode_attention": [{**DEFAULT["decode_attention"][-1], "shares_evenly": 2}]},
            "shares_evenly is 2: .* of 0 to 1",
        ),
        ({"prefill_attention": [{**ATTENTION, "block_n": 48}]}, "block_n is 48: .* power of two"),
        ({"devices": "Some"}, "devices is 'Some': it must be a list of names"),
        ({"mechanisms": []}, r"mechanisms is \[\]: it must be an object"),
        ({"mechanisms": {"magic": True}}, r"mechanisms\.magic is unknown: it must be one of dep"),
        ({"mechanisms": {"dependent_launch": 1}}, "dependent_launch is 1: it must be true or"),
    ],
)
def test_the_error_of_an_invalid_table_names_the_field(folder, kernels, message):
    devices = kernels.pop("devices", ["Some"])
    add_table(folder, devices, **kernels)
    with pytest.raises(ConfigurationError, match=message):
        load_launch_table("Another GPU", folder)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_file_that_holds_no_table_is_refused(folder, text):
    (folder / "some.json").write_text(text)
    with pytest.raises(ConfigurationError, match=r"some\.json is not"):
        load_launch_table("cpu", folder)


def test_an_incomplete_default_table_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"default\.json: block_copy is missing"):
        load_launch_table("cpu", tmp_path)
    for name, message in {
        "row_norm": "row_norm is missing",
        "mechanisms": r"mechanisms\.dependent_launch is missing",
    }.items():
        some = {key: value for key, value in DEFAULT.items() if key != name}
        (tmp_path / "default.json").write_text(json.dumps(some))
        with pytest.raises(ConfigurationError, match=rf"default\.json: {message}"):
            load_launch_table("cpu", tmp_path)

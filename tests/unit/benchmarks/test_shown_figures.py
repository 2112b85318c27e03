"""README and docs/performance.md show the figures of benchmarks/results, and name their commits."""

from pathlib import Path

import pytest

from benchmarks.shown import compare_cells, print_lines, read_results, split_cells

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "README.md").read_text()
PERFORMANCE = (ROOT / "docs" / "performance.md").read_text()


@pytest.mark.parametrize("results", read_results("compare_llama_100m"))
def test_readme_shows_the_comparison_of_each_instruction_set(results):
    for cells in compare_cells(results):
        assert f"| {cells} |" in README


@pytest.mark.parametrize("results", read_results("split_vs_whole"))
def test_the_page_shows_two_tiers_beside_one_of_each_instruction_set(results):
    for cells in split_cells(results):
        assert f"| {cells} |" in PERFORMANCE


@pytest.mark.parametrize(
    "part", ["compare_llama_100m", "split_vs_whole", "transfer", "scheduling", "constraints"]
)
def test_the_page_names_the_commit_of_the_files_that_it_shows(part):
    for results in read_results(part):
        assert results["machine"]["commit"] in PERFORMANCE


def test_the_lines_have_processor_and_commit(capsys):
    print_lines()
    (results, *_) = read_results("compare_llama_100m")
    (line, *_) = [line for line in capsys.readouterr().out.splitlines() if "(OpenVINO)" in line]
    assert line.startswith(f"| {results['machine']['cpu']}")
    assert results["machine"]["commit"] in line

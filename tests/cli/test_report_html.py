from pathlib import Path


def test_html_is_written_into_the_run(trimtab, run_dir):
    said = trimtab("report", run_dir, "--html")
    assert said.code == 0, said.err
    path = Path(said.out.strip())
    assert path == run_dir / "report.html"
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
    path.unlink()


def test_html_elsewhere_and_as_json(trimtab, run_dir, tmp_path):
    data = trimtab("report", run_dir, "--html", "--output", tmp_path / "a" / "b.html", "--json").json()
    assert data == {"schema_version": 1, "run_dir": str(run_dir), "html": str(tmp_path / "a" / "b.html")}
    assert (tmp_path / "a" / "b.html").is_file()
    said = trimtab("report", run_dir, "--html", "true", "-o", tmp_path / "c.html")
    assert said.out.strip() == str(tmp_path / "c.html")
    assert not (run_dir / "report.html").exists()


def test_html_false_is_the_text(trimtab, run_dir):
    said = trimtab("report", run_dir, "--html", "false")
    assert said.code == 0
    assert "RECOVERED" in said.out
    assert not (run_dir / "report.html").exists()


def test_what_cannot_be_written_is_said_in_one_line(trimtab, run_dir, tmp_path):
    said = trimtab("report", run_dir, "-o", tmp_path / "x.html")
    assert said.code == 2
    assert "--html" in said.err
    (tmp_path / "file").write_text("")
    said = trimtab("report", run_dir, "--html", "-o", tmp_path / "file" / "x.html")
    assert said.code == 2
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    assert trimtab("report", tmp_path, "--html").code == 2


def test_the_demo_leaves_a_page(trimtab, tmp_path):
    said = trimtab("demo", "--quick", "--dir", tmp_path)
    assert said.code == 0, said.err
    (page,) = tmp_path.glob("*/report.html")
    assert f"open {page}" in said.out
    data = trimtab("demo", "--quick", "--json", "--dir", tmp_path).json()
    assert Path(data["html"]) == Path(data["run_dir"]) / "report.html"
    assert Path(data["html"]).is_file()

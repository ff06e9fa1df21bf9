"""No advice that does not fit the run: every rule in a grid of circumstances, and every thing that a text refers to."""

from __future__ import annotations

import ast
import inspect
import io
import itertools
import math
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from tests.matrix import FULL, sampled
from tests.rules.test_each_rule import TROUBLES, at, calm, named
from trimtab import Config, Guard, TrimtabError
from trimtab.advice.engine import MOST, Facts, advise, applicable, fair_limit, gather
from trimtab.advice.guides import GUIDES
from trimtab.advice.recommendations import TABLE, advise_on
from trimtab.cli.app import app
from trimtab.core.pipeline import Brain
from trimtab.core.registry import advice_of, all_rules, find_rule, select_rules
from trimtab.core.types import Finding, Sample, Severity
from trimtab.core.window import Window
from trimtab.doctor.examine import all_checks

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from docs_static import unknown_words  # noqa: E402

PRECISION = re.compile(r"float16|GradScaler|autocast|\bscaler\b", re.IGNORECASE)
GPU = re.compile(r"\bGPU|cuda|pin_memory|non_blocking", re.IGNORECASE)
SEVERAL_MODALITIES = re.compile(r"norm-based|N-way|B\^N|number of modalities|several modalities")
NUMBER = r"[-+]?\d[\d,]*\.?\d*(?:e[-+]?\d+)?"
LOWER, RAISE, LEAVE = ("Lower the learning rate", "Raise the learning rate", "Leave the learning rate")

# -- circumstances: what a run may be like, as samples and settings show it ----------------------------------------


@dataclass(frozen=True)
class Circumstances:
    """What is laid over every sample of a history, and the settings of the guard."""

    precision: str = "float32"
    clip: Any = None
    mode: str = "advise"
    loss: float = 1.0  # a factor on every loss
    norm: float = 1.0  # a factor on every gradient norm
    rates: tuple[float, ...] = (1.0,)  # a factor on every rate, one per group
    towers: float | None = None
    later: int = 0  # steps are counted from here

    def over(self, history: list[Sample]) -> list[Sample]:
        return [replace(s, step=s.step + self.later, scalars=dict(self._scalars(s))) for s in history]

    def _scalars(self, sample: Sample) -> Iterator[tuple[str, float]]:
        for name, value in sample.scalars.items():
            if name == "lr/0":
                yield from ((f"lr/{i}", value * factor) for i, factor in enumerate(self.rates))
            elif name.startswith("lr/"):
                continue
            else:
                yield name, value * {"loss": self.loss, "grad_norm": self.norm}.get(name, 1.0)
        if sample.phase != "train":
            return
        yield "in_rms", sample.scalars.get("in_rms", 1.0)
        if {"autocast", "scale"} & sample.scalars.keys():
            pass  # the case is about precision: it has its own
        elif self.precision == "float16":
            yield from (("autocast", 1.0), ("scale", 1024.0))
        elif self.precision == "float16 without scaler":
            yield "autocast", 1.0
        elif self.precision == "bfloat16":
            yield "autocast", 2.0
        if self.towers is not None:
            yield from (("temperature", 50.0), ("towers", self.towers))


GRID = [
    *(Circumstances(precision=p) for p in ("float32", "float16", "float16 without scaler", "bfloat16")),
    *(Circumstances(clip=c, mode=m) for c, m in itertools.product((None, 1.0, "percentile"), ("observe", "act"))),
    *(Circumstances(norm=n, clip=c) for n, c in itertools.product((1e-4, 300.0), (None, 1.0))),
    *(Circumstances(loss=v, precision=p) for v, p in itertools.product((1e-3, 5e4), ("float32", "float16"))),
    *(Circumstances(towers=t) for t in (2.0, 6.0)),
    Circumstances(rates=(1.0, 0.1)),
    Circumstances(later=60_000),
]

AMP_RULES = ("gradient-underflow", "scale-collapse", "clip-before-unscale", "needless-scaler", "updates-lost")


@dataclass(frozen=True)
class Told:
    """One finding with its advice, and the facts that it was given in."""

    finding: Finding
    facts: Facts
    advice: tuple[str, ...]


def told_in(code: str, history: list[Sample], around: Circumstances) -> list[Told]:
    """What the real rule, the real facts and the real table make of a history in these circumstances."""
    config = Config.from_dict({"select": [code], "mode": around.mode, **({"clip": around.clip} if around.clip else {})})
    seen: list[Told] = []

    def adviser(finding: Finding, own: tuple[str, ...], window: Window, spent: int) -> tuple[str, ...]:
        advice = advise_on(config, finding, own, window, spent)
        seen.append(Told(finding, gather(finding, window, config, spent), advice))
        return advice

    brain = Brain(select_rules(config), None, adviser=adviser)
    for sample in around.over(history):
        brain.advance(sample, seen_at=sample.step)
    return seen


def every_told(stride: int) -> Iterator[Told]:
    for case in TROUBLES:
        for around in GRID[::stride]:
            yield from told_in(case.code, case.history, around)


@cache
def corpus(stride: int = 1) -> tuple[Told, ...]:
    return tuple(every_told(stride))


def complaints(told: Told) -> Iterator[str]:
    """What does not fit between the advice and the facts."""
    facts, advice, whole = told.facts, told.advice, " ".join(told.advice)
    if not 0 < len(advice) <= MOST or len(set(advice)) < len(advice):
        yield f"{len(advice)} points, {len(set(advice))} different"
    if "{" in whole.replace("{...}", "") or "nan" in whole.split():
        yield "a number is missing"
    half = facts.float16 or facts.scaler or facts.autocast in (1.0, 2.0) or facts.bfloat16_weights
    if PRECISION.search(whole) and not half and facts.name not in AMP_RULES:
        yield "precision in a run of float32"
    if GPU.search(whole) and not facts.gpu_error:
        yield "a GPU in a run without one"
    if SEVERAL_MODALITIES.search(whole) and not facts.towers > 2:
        yield "several modalities where there are not more than two"
    if re.search(r"loss (?:of|above) \d[^.]*overflow", whole) and not facts.float16:
        yield "an overflow in float32"
    if "set_detect_anomaly" in whole and facts.name != "nonfinite-gradient":
        yield "anomaly detection for something else than a gradient"
    yield from _rate_complaints(told)
    yield from _clip_complaints(told)
    if re.search(r"(?:Add|Lengthen|Shorten)[^.]* warm-up|over the first \d+ steps", whole) and facts.step >= 500:
        yield "warm-up after step 500"


def _rate_complaints(told: Told) -> Iterator[str]:
    facts, advice = told.facts, told.advice
    sides = [side for side in (LOWER, RAISE, LEAVE) if any(p.startswith(side) for p in advice)]
    if len(sides) > 1 or sum(p.startswith(LOWER) for p in advice) > 1:
        yield f"the learning rate in two ways: {sides}"
    if LOWER in sides and (facts.input_bad or facts.wrong_sign or facts.tiny_steps):
        yield "a lower learning rate cannot be it"
    for point in advice:
        if found := re.search(rf"learning rate[^.]*? from ({NUMBER}) to ({NUMBER})", point):
            before, after = (float(v.replace(",", "")) for v in found.groups())
            if not math.isclose(before, facts.lr, rel_tol=0.01):
                yield f"the learning rate is {facts.lr}, not {before}"
            if point.startswith((LOWER, RAISE)) and (after < before) is not point.startswith(LOWER):
                yield f"{before} to {after} is the wrong way"
    back = [i for i, p in enumerate(advice) if p.startswith("Put the learning rate back")]
    if back and back[0] > min((i for i, p in enumerate(advice) if p.startswith(("Print", "Find what"))), default=99):
        yield "first look, then act"


def _clip_complaints(told: Told) -> Iterator[str]:
    facts = told.facts
    for point in told.advice:
        if re.match(r"Clip the gradient norm", point) and facts.clipping:
            yield "clipping is on already"
        given = re.findall(r"clip=(\d[\d.]*(?:e[-+]?\d+)?)", point)
        for value in given + re.findall(r"limit[^.]*? to about (\d[\d.]*(?:e[-+]?\d+)?)(?=[\s,:;]|\.$)", point):
            theirs = facts.evidence.get("threshold", math.nan)  # what the loop clips to by itself
            if value != fair_limit(facts.calm_norm) and not math.isclose(float(value), theirs, rel_tol=0.01):
                yield f"a limit of {value} where the usual norm is {facts.calm_norm}"


@pytest.mark.parametrize("stride", sampled({"all": 1, "every 7th": 7}, ["every 7th"], others=FULL))
def test_every_rule_gives_only_advice_that_fits_its_circumstances(stride: int) -> None:
    wrong = {
        f"{told.finding.name} at step {told.finding.step}: {complaint}: {told.advice}"
        for told in corpus(stride)
        for complaint in complaints(told)
    }
    assert sorted(wrong) == []
    assert {told.finding.code for told in corpus(stride)} == {case.code for case in TROUBLES}


@pytest.mark.long
def test_the_grid_is_wide_enough_to_tell_runs_apart() -> None:
    """Where circumstances matter the same finding has different advice."""
    by_name: dict[str, set[tuple[str, ...]]] = {}
    for told in corpus():
        by_name.setdefault(told.finding.name, set()).add(told.advice)
    for name in ("exploding-gradient", "nonfinite-loss", "nonfinite-gradient", "loss-spike", "weight-jump"):
        assert len(by_name[name]) > 4, name
    kinds = {(f.float16, f.scaler, f.clipping, f.towers > 2, f.mode) for told in corpus() for f in [told.facts]}
    assert len(kinds) >= 8


def test_the_complaints_can_be_provoked() -> None:
    """A check that finds nothing anywhere would prove nothing."""
    facts = Facts(name="exploding-gradient", step=900, rates=(0.1,), calm_norm=3.0, usual_norm=3.0, clipping=True)
    finding = Finding(code="X", name="exploding-gradient", step=900, severity=Severity.ERROR, message="x")
    for text, expected in (
        ("Use bfloat16.", "precision"),
        ("Load data with pin_memory=True.", "GPU"),
        ("Use the norm-based similarity.", "several modalities"),
        ("A loss of 2,000 is about to overflow.", "overflow"),
        ("Clip the gradient norm at 0.3, `Guard(..., clip=0.3)`.", "a limit of 0.3"),
        ("Clip the gradient norm.", "clipping is on"),
        ("Add warm-up.", "warm-up"),
        ("Lower the learning rate from 0.2 to 0.02.", "the learning rate is 0.1"),
        ("Lower the learning rate from 0.1 to 0.2.", "wrong way"),
        ("Lower the clip limit from 1 to about 0.3.", "a limit of 0.3"),
    ):
        assert any(expected in c for c in complaints(Told(finding, facts, (text,)))), text
    both = ("Find what set the rate.", "Put the learning rate back to 0.1.")
    assert any("first look" in c for c in complaints(Told(finding, facts, both)))
    two = (f"{LOWER}.", f"{RAISE}.")
    assert any("two ways" in c for c in complaints(Told(finding, facts, two)))


@pytest.mark.long
def test_every_recommendation_is_shown_somewhere() -> None:
    """One that is always pushed out by others, or whose condition never holds, is dead text."""
    shown = {
        one.id for told in corpus() for one in applicable(told.facts, TABLE) if one.said(told.facts) in told.advice
    }
    rest = [one for one in TABLE if one.id not in shown]
    tests = (ROOT / "tests" / "advice" / "test_advice.py").read_text(encoding="utf-8")
    assert [one.id for one in rest if f'"{one.id}"' not in tests] == []  # shown there, in circumstances of its own


# -- what a text refers to exists ------------------------------------------------------------------------------------


def advice_texts() -> list[tuple[str, str]]:
    """Everything that is said as advice: where from, and the text."""
    found = [(f"recommendation {r.id}", text) for r in TABLE for text in (r.text, r.filled) if text]
    found += [(f"rule {rule.name}", text) for rule in all_rules() for text in advice_of(rule)]
    for check in all_checks():
        found += [(f"check {check.name}", text) for text in advice_of(type(check))]  # type: ignore[arg-type]
    for guide in GUIDES.values():
        told = (guide.signs, *guide.beware, *(t for p in guide.points for t in (p.do, p.check)))
        found += [(f"guide {guide.problem}", text) for text in told]
    return found


TEXTS = advice_texts()
SAMPLE_FIGURES = {key: "2" for text in (r.filled for r in TABLE) for key in re.findall(r"\{(\w+)\}", text)}


def code_in(text: str) -> list[str]:
    parts = re.findall(r"`([^`]+)`", text)
    return [re.sub(r"\{(\w+)\}", lambda found: SAMPLE_FIGURES.get(found[1], found[0]), part) for part in parts]


def wrong_code(code: str) -> Iterator[str]:
    """What a piece of code names that is not there: a command, a setting, an argument, a name of torch or of ours."""
    if code.startswith("trimtab "):
        yield from unknown_words(code)
        return
    if code.startswith("--"):
        yield from (f"no command takes {code}" for _ in range(code.split()[0].replace("_", "-") not in all_flags()))
        return
    if _is_toml(code):
        yield from _unknown_setting(code)
        return
    try:
        tree = ast.parse(f"{code} pass" if code.endswith(":") else code)
    except SyntaxError:
        if not re.fullmatch(r"\.\w+(\(\))?|\w+=|[A-Z_]+=\d|[\w.]+\.\.\.|\w+:\w+", code):
            yield f"not Python: {code}"
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Guard":
            known = inspect.signature(Guard.__init__).parameters
            yield from (f"Guard takes no {word.arg}" for word in node.keywords if word.arg not in known)
        if isinstance(node, ast.Attribute):
            yield from _unknown_attribute(ast.unparse(node))
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and code.startswith(("mode=", "clip="))
        ):
            yield from _unknown_setting(code.replace("=", " = ", 1))


@cache
def all_flags() -> frozenset[str]:
    def of(command: Any) -> Iterator[str]:
        yield from (name for p in command.params for name in (*p.opts, *p.secondary_opts))
        for inner in getattr(command, "commands", {}).values():
            yield from of(inner)

    return frozenset(of(typer.main.get_command(app)))


def _is_toml(code: str) -> bool:
    try:
        return bool(tomllib.loads(code)) and " = " in code
    except tomllib.TOMLDecodeError:
        return False


def _unknown_setting(code: str) -> Iterator[str]:
    try:
        Config.from_dict(tomllib.loads(code))
    except (tomllib.TOMLDecodeError, TrimtabError) as error:
        yield str(error)


def _unknown_attribute(dotted: str) -> Iterator[str]:
    homes: dict[str, Any] = {"torch": torch, "guard": Guard, "scaler": torch.amp.GradScaler, "math": math}
    homes |= {"optimizer": torch.optim.AdamW, "loss": torch.Tensor, "x": torch.Tensor}
    first, *names = dotted.split(".")
    home = homes.get(first)
    for name in names if home is not None else ():
        if not name.isidentifier():
            return
        if not hasattr(home, name) and name not in ("state", "param_groups"):
            yield f"there is no {dotted}"
            return
        home = getattr(home, name, home)


@pytest.mark.parametrize("place", sorted({place for place, _ in TEXTS}))
def test_what_advice_names_exists(place: str) -> None:
    wrong = [f"{c}: {why}" for p, text in TEXTS if p == place for c in code_in(text) for why in wrong_code(c)]
    assert wrong == []


def test_wrong_names_are_found() -> None:
    for code in (
        "trimtab traces RUN",
        "trimtab report --by-layer",
        "activation = true",
        "Guard(..., clipping=1.0)",
        "guard.healthy()",
        "torch.amp.GradientScaler",
        'mode="fix"',
    ):
        assert list(wrong_code(code)), code


def test_no_text_of_the_program_names_a_command_that_does_not_exist() -> None:
    """Messages and help texts too: whatever stands between backticks and begins with our name."""
    wrong = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                commands = re.findall(r"`(trimtab [a-z][^`]*)`", node.value)
                wrong += [f"{path.name}:{node.lineno}: {why}" for c in commands for why in unknown_words(c)]
    assert wrong == []


def test_rules_that_advice_names_exist() -> None:
    known = {rule.name for rule in all_rules()} | {check.name for check in all_checks()}
    families = {name.split("-")[0] for name in known}
    english = {
        "one-sided", "norm-based", "out-of-range", "hand-written", "hand-made", "zero-grad", "loss-free", "not-so",
        "step-by-step", "double-checked", "input-output", "in-place", "label-smoothed", "weight-decay",
    }  # fmt: skip
    said = {w for _, t in TEXTS for w in re.findall(r"(?<![\w`-])[a-z]+(?:-[a-z]+)+(?![\w-])", t)}
    assert {w for w in said if w.split("-")[0] in families} - known - english == set()


# -- the views of the report -----------------------------------------------------------------------------------------

VIEW = re.compile(r'((?:"[^"]+"(?:, | and | or )?)+) in `(trimtab report[^`]*)`')


@pytest.fixture(scope="module")
def views(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a report of a real run shows: as text, and as a page."""
    from rich.console import Console

    from trimtab.record.reader import read_run
    from trimtab.report.html import to_html
    from trimtab.report.summary import summarise
    from trimtab.report.text import render

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Guard(model, optimizer, run_dir=tmp_path_factory.mktemp("run") / "one") as guard:
        for step in range(60):
            x = torch.randn(8, 4)
            loss = (model(x * (math.nan if step == 40 else 1.0)) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            guard.step(loss)
            optimizer.zero_grad()
    assert guard.run_dir is not None
    run = read_run(guard.run_dir)
    out = Console(width=100, file=io.StringIO())
    out.print(render(summarise(run), width=100))
    page = to_html(run)
    titles = re.findall(r"<h[23][^>]*>(.*?)</h[23]>", page, re.DOTALL)
    return {"trimtab report": out.file.getvalue(), "trimtab report --html": "\n".join(titles)}


def test_every_view_that_advice_names_is_in_the_report(views: dict[str, str]) -> None:
    named_views = [(place, view, command) for place, text in TEXTS for view, command in views_in(text)]
    missing = [found for found in named_views if found[1] not in views[found[2]]]
    assert missing == []
    assert len(named_views) > 10
    assert "Ratio by layer" not in views["trimtab report --html"]


def views_in(text: str) -> list[tuple[str, str]]:
    return [(name, command) for quoted, command in VIEW.findall(text) for name in re.findall(r'"([^"]+)"', quoted)]


def test_whoever_sends_a_reader_to_the_report_says_what_to_look_at() -> None:
    vague = [f"{place}: {text}" for place, text in TEXTS if text.count("`trimtab report") != len(VIEW.findall(text))]
    assert vague == []


def test_facts_come_from_the_run(views: dict[str, str]) -> None:
    """What conditions ask for is really measured: a fact that nobody tells would silence its advice for ever."""
    window = Window()
    for sample in calm(20):
        window.look(sample)
        window.absorb(alarming=False)
    extra = {"towers": 3.0, "temperature": 20.0, "float16": 1.0, "bfloat16": 1.0, "moment_lag": 1.0, "batch_size": 8.0}
    window.look(at(20, **extra))
    finding = Finding(code="X", name="loss-spike", step=20, severity=Severity.ERROR, message="x", subject=("loss",))
    facts = gather(finding, window, Config(), 0)
    assert (facts.towers, facts.temperature, facts.batch_size) == (3.0, 20.0, 8.0)
    assert facts.float16_weights
    assert facts.bfloat16_weights
    assert facts.adam
    assert facts.subject == ("loss",)
    assert "cut_lr" in facts.remedies or "rewind" in facts.remedies
    written = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "src" / "trimtab" / "sample").rglob("*.py"))
    for name in (*extra, "autocast", "in_rms", "in_bad"):
        assert f'"{name}"' in written or name == "batch_size", name


def test_a_point_of_a_rule_fits_every_finding_of_that_rule() -> None:
    """What stands on the page of a rule is said in all circumstances, so it must not depend on any."""
    depends = re.compile(r"clip=|\bclip\b|learning rate (?:tenfold|by half)|CUDA|pin_memory|Guard\(\.\.\., clip")
    for rule in all_rules():
        if rule.name in AMP_RULES:
            continue
        for text in advice_of(rule):
            assert not depends.search(text), f"{rule.name}: {text}"


def test_advice_of_a_plug_in_rule_is_taken_from_its_page() -> None:
    class Mine:
        """Mine.

        ## What to try
        1. Do this.
        2. Then that.
        """

    assert advice_of(Mine) == ("Do this.", "Then that.")  # type: ignore[arg-type]
    facts = Facts(name="mine", step=3)
    finding = Finding(code="X", name="mine", step=3, severity=Severity.WARN, message="x")
    assert advise(finding, advice_of(Mine), facts, TABLE) == ("Do this.", "Then that.")  # type: ignore[arg-type]


def test_the_worst_of_the_old_advice_is_gone() -> None:
    """Clip at 0.3, whatever the norm; a view that does not exist; look before you act."""
    make: Callable[..., list[Sample]] = lambda norm: [*calm(60, grad_norm=norm), at(60, grad_norm=1e4 * norm)]  # noqa: E731
    for norm in (1e-3, 1.0, 500.0):
        for around in (Circumstances(), Circumstances(clip=1.0), Circumstances(clip=1e4)):
            for told in told_in("GRAD002", make(norm), around):
                assert not re.search(r"\b0\.3\b", " ".join(told.advice))
    assert not any("by layer" in t and "ratio" in t.lower() and "norm" not in t.lower() for _, t in TEXTS)
    assert find_rule("OPT001").name == "learning-rate"
    assert named(TROUBLES[0])

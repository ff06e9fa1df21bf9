from trimtab.core.types import Finding, Severity, Verdict
from trimtab.report.summary import find_incidents, find_troubles


def finding(code: str, step: int, streak: int = 1, optimizer: str = "", severity: Severity = Severity.ERROR) -> Finding:
    return Finding(
        code=code, name=code.lower(), step=step, severity=severity, message="m", streak=streak, optimizer=optimizer
    )


def verdict(step: int, *findings: Finding, optimizer: str = "") -> Verdict:
    return Verdict(step=step, seen_at=step, findings=findings, optimizer=optimizer)


def test_a_streak_is_one_trouble():
    troubles = find_troubles([verdict(s, finding("A", s, streak=s - 4)) for s in (5, 6, 7)])
    assert [(t.finding.step, t.last_step, t.num_steps) for t in troubles] == [(5, 7, 3)]


def test_what_overlaps_is_one_incident_first_cause_first():
    found = find_incidents(
        [
            verdict(10, finding("LOSS", 10), finding("GRAD", 10)),
            verdict(12, finding("WGT", 12, severity=Severity.FATAL)),
            verdict(90, finding("LOSS", 90)),
        ]
    )
    assert [(i.onset, i.last_step) for i in found] == [(10, 12), (90, 90)]
    assert [t.finding.code for t in found[0].troubles] == ["LOSS", "GRAD", "WGT"]
    assert found[0].cause.code == "LOSS"
    assert found[0].severity is Severity.FATAL


def test_optimizers_have_incidents_of_their_own():
    found = find_incidents(
        [verdict(3, finding("A", 3, optimizer="g"), optimizer="g"), verdict(3, finding("A", 3, optimizer="d"))]
    )
    assert {i.optimizer for i in found} == {"g", "d"}
    assert find_incidents([]) == ()

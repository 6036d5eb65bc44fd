"""The page of a plan: well formed, complete, and whatever it is told stays text."""

from html.parser import HTMLParser
from pathlib import Path

from coda_agent.agent.plans.rules import Note
from coda_agent.agent.plans.show import Cost, Shown
from coda_agent.evals import plan_page

VOID = {"meta", "br", "hr"}


class Page(HTMLParser):
    """Collects a page's text and tags, and checks that each is closed where it was opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.tags, self.text = list[str](), list[str](), list[str]()
        self.links = list[str | None]()
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value for key, value in attrs if key in ("href", "src", "onclick")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data.strip())


def cost(step: str, moved: int, takes: list[int], what: str = "composed: linear") -> Cost:
    return Cost(step=step, bytes=moved, launches=1, floor_us=2.5, what=what, takes=takes)


def plan(hostile: str = "") -> Shown:
    steps = [
        cost("inner_1", 3_000_000, []),
        cost(f"v3 = torch.rsqrt(v2{hostile})", 100_000, [0], "tail"),
        cost("inner_2", 4_000_000, [0, 1], "gemm_rmsnorm, accepted: linear"),
    ]
    return Shown(
        graph=[f"v1 = F.linear(x, w)  # [64, 64]{hostile}"],
        notes=[Note("a rule", True, "v1", f"its reason{hostile}"), Note("b rule", False, "v2", "no")],
        changed=["-v2 = x * r", f"+c1 = x @ w{hostile}"], steps=steps,
        eager=cost("eager", 9_000_000, []), packed=0,
        kernels=[(f"def inner_1(x): ...{hostile}", "", "PROGRAM")],
    )  # fmt: skip


def test_a_page_has_every_step_every_rule_that_fired_and_the_diff(tmp_path: Path) -> None:
    page = Page(plan_page.write(tmp_path / "plan.html", "inner", plan()).read_text("utf-8"))
    for step in plan().steps:
        assert step.step in page.text
    assert "a rule" in page.text and "b rule" not in page.text
    assert page.tags.count("ins") == page.tags.count("del") == 1
    # Three boxes, an edge from the first to each of the others, and one between these.
    assert page.tags.count("rect") == page.tags.count("path") == 3
    assert "3.0 MB, 2.5 µs" in page.text  # in the picture
    assert {"7.1 MB", "9.0 MB", "7.5 µs"} <= {
        *page.text
    }  # of the plan, of PyTorch, the plan's floor
    assert not page.links and "script" not in page.tags


def test_what_a_function_says_stays_text(tmp_path: Path) -> None:
    hostile = '<script>alert("1")</script><b x=\'&amp;'
    page = Page(plan_page.write(tmp_path / "plan.html", hostile, plan(hostile)).read_text("utf-8"))
    assert not {"script", "b"} & {*page.tags}
    assert f"Plan of {hostile}" in page.text
    assert f"def inner_1(x): ...{hostile}" in page.text


def test_a_function_without_steps_has_a_page(tmp_path: Path) -> None:
    empty = Shown(
        graph=[], notes=[], changed=[], steps=[], eager=cost("eager", 0, []), packed=0, kernels=[]
    )
    page = Page(plan_page.write(tmp_path / "plan.html", "nothing", empty).read_text("utf-8"))
    assert "svg" not in page.tags and "None." in page.text

"""The functions of `import shardlab`: their examples (and those of all modules), results in a notebook, and errors."""

from __future__ import annotations

import doctest
import inspect
import pickle
import pydoc
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import pytest
from IPython.lib import pretty

import shardlab
import shardlab.models
from examples.my_strategy import my_ddp
from shardlab import Refused, UserError, api
from shardlab.language import Holds, Kind, Mesh, Rank, Spec, Store
from shardlab.language.rules.spec import Space, form_of
from shardlab.learn.puzzles import grade
from shardlab.models import find_model
from shardlab.simulate.hardware import find_cluster
from shardlab.strategies.ddp import ddp
from shardlab.strategies.fsdp import fsdp

FUNCTIONS = ("trace", "check", "simulate", "predict", "plan", "verify", "train", "draw")

MOST = 2000
"""Most characters of a result's repr."""

NAMES: dict[str, Any] = {
    "shardlab": shardlab,
    "fsdp": fsdp,
    "my_solution": ddp,
    "Holds": Holds,
    "Kind": Kind,
    "Space": Space,
    "Spec": Spec,
    "form_of": form_of,
}
"""What the reader of a module's examples has imported or written."""

COLOURED = ("FORCE_COLOR", "CLICOLOR_FORCE")
"""Variables that ipykernel sets, so that programs write colours although their output is no terminal."""

ZERO_1 = shardlab.Plan(Mesh(dp_shard=8), shard_optimizer=("dp_shard",))

SEARCH: dict[str, Any] = {"seconds": 60, "forecasts": 6, "tp": 1, "pp": 1, "micro_batch_size": 2, "global_batch": 64}


async def keeps_own_gradient(rank: Rank) -> None:
    """A data-parallel step without a reduction of gradients."""
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
    rank.activations[0] = rank.load_batch(rank.share())
    for l in rank.layers:
        rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l])
    grad = rank.loss(rank.activations.pop(len(rank.layers)))
    for l in reversed(rank.layers):
        grad_weight, grad = rank.backward(l, rank.activations.pop(l), grad, rank.weights[l])
        rank.weights[l], rank.opt_states[l] = rank.update(l, grad_weight, rank.weights[l], rank.opt_states[l])


async def divides_by_zero(rank: Rank) -> None:
    """A program that raises."""
    print(1 // (len(rank.layers) - 4))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_example_of_a_function_is_true(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    examples = doctest.DocTestFinder(recurse=False).find(
        getattr(api, name), name, module=api, extraglobs={"shardlab": shardlab, "Mesh": Mesh}
    )
    assert examples
    assert examples[0].examples
    assert doctest.DocTestRunner(verbose=False).run(examples[0]).failed == 0


def _modules_with_examples() -> list[str]:
    source = Path(shardlab.__file__).parent
    paths = [path for path in sorted(source.rglob("*.py")) if ">>> " in path.read_text() and path.name != "api.py"]
    names = [".".join((source.name, *path.relative_to(source).with_suffix("").parts)) for path in paths]
    return [name.removesuffix(".__init__") for name in names]


@pytest.mark.parametrize("name", _modules_with_examples())
def test_the_examples_of_a_module_are_true(name: str) -> None:
    doctests = doctest.DocTestFinder().find(import_module(name), extraglobs=NAMES)
    results = [doctest.DocTestRunner(verbose=False).run(examples) for examples in doctests if examples.examples]
    assert results
    assert sum(result.failed for result in results) == 0


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_the_package_is_that_of_the_api(name: str) -> None:
    assert inspect.signature(getattr(shardlab, name)) == inspect.signature(getattr(api, name))


@pytest.mark.parametrize("name", ["check", "draw", "simulate", "train"])
def test_a_package_can_be_called_and_imported_from(name: str) -> None:
    package = import_module(f"shardlab.{name}")
    assert getattr(shardlab, name) is package
    assert package.__path__
    assert callable(package)
    assert pickle.loads(pickle.dumps(package)) is package


def test_an_unknown_name_of_the_package_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'shardlab' has no attribute 'plann'"):
        getattr(shardlab, "plann")  # noqa: B009
    with pytest.raises(AttributeError, match=r"module 'shardlab\.draw' has no attribute 'paint'"):
        getattr(import_module("shardlab.draw"), "paint")  # noqa: B009


def test_the_import_loads_no_torch_no_matplotlib_and_no_planner() -> None:
    heavy = (
        "torch",
        "matplotlib",
        "tyro",
        "shardlab.planner",
        "shardlab.cli",
        "shardlab.models",
        "shardlab.strategies",
    )
    code = f"import shardlab, sys; print([name for name in {heavy!r} if name in sys.modules])"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout == "[]\n"


def test_every_result_has_a_short_repr() -> None:
    program = shardlab.trace("fsdp", ranks=8, layers=24, microbatches=8)
    proof = shardlab.check(program)
    step = shardlab.predict("gpt2-xl", "a100x8", ZERO_1, global_batch=64)
    chosen = shardlab.plan("gpt2-xl", "a100x8", **SEARCH)
    results: list[Any] = [program, proof, shardlab.simulate(proof), step, step.workload, step.forecast, chosen]
    results += [step.workload.estimate(), step.timeline(), chosen.choice, chosen.plan, shardlab.draw("ddp", ranks=2)]
    for result in results:
        assert len(repr(result)) <= MOST, type(result)
        assert "\n" not in repr(result), type(result)


def test_a_name_a_function_and_a_plan_give_the_same_program() -> None:
    assert shardlab.trace(fsdp, 4, 6).fingerprint() == shardlab.trace("fsdp", 4, 6).fingerprint()
    plan = shardlab.Plan(Mesh(pp=4), "gpipe")
    assert shardlab.trace(plan).fingerprint() == shardlab.trace("gpipe", ranks=4).fingerprint()
    assert shardlab.trace(fsdp, Mesh(dp_shard=2)).ranks == 2


def test_simulate_takes_what_check_returns_and_other_costs() -> None:
    proof = shardlab.check("gpipe", ranks=4)
    assert shardlab.check(proof) is proof
    assert shardlab.simulate(proof).end == shardlab.simulate("gpipe", ranks=4).end
    assert shardlab.simulate(proof, "forward=1").end < shardlab.simulate(proof).end


def test_check_applies_the_passes_of_a_plan() -> None:
    plan = shardlab.Plan(Mesh(dp_shard=2), passes="offload=optimizer:host")
    assert shardlab.check(plan).program.fingerprint() != shardlab.trace(plan).fingerprint()


def test_a_plan_is_predicted_to_take_the_time_of_its_search() -> None:
    chosen = shardlab.plan("gpt2-xl", "a100x8", **SEARCH)
    precision = chosen.choice.best.candidate.precision.name
    step = shardlab.predict("gpt2-xl", "a100x8", chosen.plan, global_batch=64, micro_batch_size=2, precision=precision)
    assert step == chosen.prediction or step.seconds == pytest.approx(chosen.prediction.seconds, rel=0.01)
    assert 0 < step.mfu < 1
    assert step.tokens_per_second == pytest.approx(64 * 1024 / step.seconds)
    assert step.fits


@pytest.mark.parametrize("model", ["gpt2", "mixtral-8x7b"])
def test_a_step_is_the_same_by_names_and_by_objects(model: str) -> None:
    by_name, by_object = (
        shardlab.predict(name, cluster, ZERO_1, recipe="nanotron", memory="20GiB")
        for name, cluster in ((model, "a100x8"), (find_model(model), find_cluster("a100x8")))
    )
    assert by_object.forecast == by_name.forecast
    assert by_object.forecast.memory.capacity == 20 * 2**30


def test_a_plan_that_the_recipe_cannot_run_is_predicted_only_as_if() -> None:
    zero_v = shardlab.Plan(Mesh(pp=2, dp_shard=4), schedule="zb-v")
    with pytest.raises(
        UserError, match=r"megatron-core has no pipeline schedule zb-v; .*, or as_if to predict it as if"
    ):
        shardlab.predict("gpt2", "a100x8", zero_v, recipe="megatron-core")
    with pytest.raises(UserError, match="as_if is for the recipe of a framework; give recipe=NAME, or leave it out"):
        shardlab.predict("gpt2", "a100x8", zero_v, as_if=True)
    assert shardlab.predict("gpt2", "a100x8", zero_v, recipe="megatron-core", as_if=True).seconds > 0


def test_a_step_that_does_not_fit_is_predicted() -> None:
    plan = shardlab.Plan(Mesh(dp_shard=8))
    step = shardlab.predict("llama3-8b", "a100x8", plan, tokens_per_step="64K")
    assert not step.fits
    assert step.memory > step.forecast.memory.capacity


def test_the_text_of_a_chosen_plan_is_the_report_of_the_command(tmp_path: Path) -> None:
    chosen = shardlab.plan("gpt2-xl", "a100x8", **SEARCH)
    lines = str(chosen).splitlines()
    assert lines[0] == "plan of gpt2-xl on a100x8"
    assert any(line.startswith("step time") for line in lines)
    assert chosen._repr_html_().startswith("<pre>plan of gpt2-xl on a100x8")
    chosen.save(tmp_path / "plan.toml")
    with pytest.raises(UserError, match=r"path is 3; give a file, such as plan\.toml"):
        chosen.save(cast(Any, 3))
    tables = tomllib.loads((tmp_path / "plan.toml").read_text())
    assert tables["plan"] == chosen.plan.as_dict()
    assert (tables["model"]["model"], tables["cluster"]["cluster"]) == ("gpt2-xl", "a100x8")
    with pytest.raises(UserError, match="it cannot be written: No such file"):
        chosen.save(tmp_path / "missing" / "plan.toml")


def test_a_report_is_text_in_a_notebook_as_well(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = shardlab.plan("gpt2-xl", "a100x8", **SEARCH)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    for variable in COLOURED:
        monkeypatch.setenv(variable, "1")
    assert str(chosen).startswith("plan of gpt2-xl on a100x8")
    assert "\x1b" not in str(chosen) + chosen._repr_html_()
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    "show",
    [
        lambda: shardlab.trace("ddp"),
        lambda: shardlab.check("ddp"),
        lambda: shardlab.simulate("gpipe"),
        lambda: shardlab.predict("gpt2", "a100x8", ZERO_1, global_batch=8),
        lambda: grade("ddp", my_ddp),
    ],
)
def test_results_have_no_colours_of_a_terminal_in_a_notebook(show: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in COLOURED:
        monkeypatch.setenv(variable, "1")
    result = show()
    texts = [getattr(result, name)() for name in ("__str__", "__repr__", "_repr_html_") if hasattr(result, name)]
    assert all("\x1b" not in str(text) for text in texts)


def test_a_plan_shows_what_differs_from_the_defaults() -> None:
    plan = shardlab.Plan(Mesh(dp_shard=8, tp=2), shard_optimizer=("dp_shard",), sequence_parallel=True)
    text = "Plan(Mesh(dp_shard=8, tp=2), shard_optimizer=('dp_shard',), sequence_parallel=True)"
    assert str(plan) == cast(Any, pretty).pretty(plan) == text
    assert str(shardlab.Plan()) == "Plan(Mesh())"


@pytest.mark.parametrize("name", ["check", "draw", "simulate", "train"])
def test_help_shows_the_function_of_a_package_first(name: str) -> None:
    text = pydoc.plain(pydoc.render_doc(getattr(shardlab, name)))
    function = getattr(api, name)
    first, about = f"{name}{inspect.signature(function)}", text.index("DESCRIPTION")
    assert first in text[:about]
    assert (inspect.getdoc(function) or "").splitlines()[0] in text[about : about + 300]


def test_draw_shows_timelines_predictions_and_values(tmp_path: Path) -> None:
    timeline = shardlab.simulate("ddp", ranks=2)
    assert "<svg" in shardlab.draw(timeline, tmp_path / "ddp.svg", title="two ranks").svg
    assert "two ranks" in (tmp_path / "ddp.svg").read_text()
    step = shardlab.predict("gpt2", "a100x8", ZERO_1, global_batch=8)
    drawing = shardlab.draw(step)
    assert "time (seconds)" in drawing.svg
    assert drawing._repr_svg_() == drawing.svg
    with pytest.raises(UserError, match="it cannot be written: No such file"):
        shardlab.draw(timeline, tmp_path / "missing" / "ddp.svg")


def test_a_store_has_neither_title_nor_colours() -> None:
    stores: list[Store] = []

    async def program(rank: Rank) -> None:
        stores.append(rank.weights)

    shardlab.trace(program, ranks=1)
    for settings in ({"title": "weights"}, {"color_by": "layer"}):
        with pytest.raises(UserError, match="is no timeline; leave title and color_by out"):
            cast(Any, shardlab.draw)(stores[0], **settings)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: shardlab.trace("fsdq"), r"there is no strategy 'fsdq'; did you mean fsdp\?"),
        (
            lambda: shardlab.check(cast(Any, 3)),
            "strategy is 3; give a name, a plan, or an async function of one rank",
        ),
        (lambda: shardlab.check("fsdp", ranks=0), "ranks: 0 is too few; give 1 or more"),
        (lambda: shardlab.check("fsdp", ranks=cast(Any, "4")), "ranks: '4' is not a whole number; give 1 or more"),
        (lambda: cast(Any, shardlab.simulate)("fsdp", rank=4), r"there is no argument 'rank'; did you mean ranks\?"),
        (lambda: shardlab.check(cast(Any, len)), "async"),
        (lambda: shardlab.check(ZERO_1, ranks=4), "the plan's mesh dp_shard 8 does not fit on 4 ranks"),
        (lambda: shardlab.simulate("fsdp", "forwrd=1"), "there is no cost 'forwrd'"),
        (lambda: shardlab.predict("gpt2-xll", "a100x8", ZERO_1), "did you mean gpt2-xl"),
        (lambda: shardlab.predict("gpt2", "a100x8", "fsdp"), "fsdp is a program without a plan"),
        (
            lambda: shardlab.predict("gpt2", "a100x8", ZERO_1, precision="bf16,fp16"),
            "precision bf16,fp16 names 2 precisions, .*; give one",
        ),
        (lambda: shardlab.predict("gpt2", "a100x4", ZERO_1), "8 (ranks|devices)"),
        (lambda: shardlab.predict("gpt2", "a100x8", ZERO_1, global_batch=12), "give global_batch=8 or 16"),
        (lambda: shardlab.plan("gpt2", "a100x8", max_tpp=4), r"there is no option max_tpp=4; did you mean max_tp"),
        (lambda: shardlab.plan("gpt2", "a100x8", json=True), "json is an option of the command shardlab plan only"),
        (lambda: shardlab.plan("gpt2", "a100x8", seconds=-1), "is not a time"),
        (lambda: shardlab.plan("gpt2", "a100x8", write="x"), "write is an option of the command shardlab plan only"),
        (lambda: shardlab.plan("gpt2", "a100x8", search_schedule=2), "search_schedule is an option of the command"),
        (lambda: shardlab.plan("gpt2", "a100x8", explain=[]), r"explain is \[\]; give True or False"),
        (lambda: shardlab.plan("gpt2", "a100x8", tp=True), "tp is True; give its value, or leave it out"),
        (lambda: shardlab.plan("gpt2", "a100x8", shard_parameters=True), "shard_parameters is True; give its value"),
        (lambda: shardlab.plan("gpt2", "a100x8", tied=False, untied=False, bias=True, no_bias=True), "both bias and"),
        *(
            (
                lambda number=number: shardlab.trace("fsdp", **{number: 10**30}),
                "and at most 500,000 are traced; take fewer",
            )
            for number in ("ranks", "layers", "microbatches")
        ),
        (lambda: shardlab.verify("ddp", all=True), "all is an option of the command shardlab verify only"),
        (lambda: shardlab.check(cast(Any, keeps_own_gradient(cast(Any, None)))), "; give keeps_own_gradient itself"),
        (lambda: shardlab.check(shardlab.trace("ddp"), ranks=4), "keeps its ranks, layers and microbatches"),
        (
            lambda: cast(Any, shardlab.simulate)(),
            "simulate: missing a required argument: 'strategy'; it takes strategy",
        ),
        (
            lambda: shardlab.simulate("fsdp", cast(Any, {"forward": 1})),
            "costs is {'forward': 1}; give teaching, puzzle",
        ),
        (lambda: shardlab.predict(cast(Any, shardlab.models.Llama), "a100x8", "zero-3"), "model is the class Llama"),
        (lambda: shardlab.predict("gpt2", cast(Any, ZERO_1), "a100x8"), r"cluster is Plan\(.*; give a name such as"),
        (
            lambda: shardlab.predict("gpt2", "a100x8", cast(Any, {"dp_shard": 8})),
            "plan is {'dp_shard': 8}; give a plan",
        ),
        (lambda: cast(Any, shardlab.predict)("gpt2", "a100x8", ZERO_1, globalbatch=8), "did you mean global_batch"),
        (
            lambda: shardlab.plan(cast(Any, shardlab.models.Llama()), "a100x8"),
            "model is Llama.*; give a name, or a file",
        ),
        (lambda: shardlab.verify(cast(Any, 3)), "strategy is 3; give a name"),
        (lambda: shardlab.draw("zb-h1", color_by=cast(Any, "layers")), "no color_by 'layers'; did you mean layer"),
        (
            lambda: shardlab.verify("ddp", model=shardlab.models.Llama()),
            r"model is Llama\(.*; give a text or a number, as on the command line",
        ),
        (lambda: shardlab.verify("ddp", help=True), "help is an option of the command shardlab verify only"),
        (lambda: shardlab.draw(None), "thing is None; give a timeline, a prediction"),
        (lambda: shardlab.draw("zb-h1", title=cast(Any, [])), r"title is \[\]; give a word in quotes"),
        (lambda: cast(Any, shardlab.draw)("gpipe", color="layer"), "no argument 'color'; did you mean color_by"),
        (
            lambda: shardlab.draw("gpipe", "out.png"),
            "path is 'out.png'; give a file that ends in .svg, such as out.svg",
        ),
        (lambda: shardlab.draw(shardlab.simulate("ddp"), ranks=4), "keeps its costs, ranks, layers and microbatches"),
        (
            lambda: shardlab.check(ZERO_1, ranks=Mesh(pp=8)),
            "ranks is the mesh pp 8, and the plan's mesh is dp_shard 8;",
        ),
        (lambda: shardlab.check("zero-1", ranks=Mesh(tp=2)), "ranks is the mesh tp 2, and the plan's mesh is dp_shard"),
        (lambda: shardlab.check("fsdp", microbatches=cast(Any, None)), "microbatches: None is not a whole number"),
        (lambda: shardlab.check("fsdp", layers=cast(Any, Mesh(pp=2))), r"layers: Mesh\(.* is not a whole number"),
        (lambda: shardlab.check("fsdp", ranks=True), "ranks: True is not a whole number; give 1 or more"),
        (lambda: Mesh(tp=True), "axis tp has True ranks; give a whole number"),
        *(
            (
                lambda name=name, value=value: cast(Any, shardlab.predict)("gpt2", "a100x8", ZERO_1, **{name: value}),
                text,
            )
            for name, value, text in (
                ("precision", ["bf16"], r"precision is \['bf16'\]; give a name such as bf16"),
                ("precision", "", "precision is ''; give a name such as bf16"),
                ("recipe", False, "recipe is False; give a name such as torchtitan, or a file"),
                ("recipe", "", "recipe is ''; give a name such as torchtitan, or a file"),
                ("switches", [], r"switches is \[\]; give options by name, such as {\"attention\": \"flash2\"}"),
                (
                    "switches",
                    {"attention": ["flash2"]},
                    r"switches is {'attention': \['flash2'\]}; give options by name",
                ),
                ("switches", {3: "flash2"}, "switches is {3: 'flash2'}; give options by name"),
                ("memory", 2**30, "memory is 1073741824; give bytes with their unit"),
                ("optimizer", "AdamW", "optimizer is 'AdamW'; give one of adamw, sgd, lion, muon"),
                ("optimizer", None, "optimizer is None; give one of adamw"),
                ("tokens_per_step", "", "tokens_per_step is ''; give"),
                ("tokens_per_step", True, "tokens_per_step is True; give"),
            )
        ),
        (lambda: shardlab.Plan(cast(Any, 4)), r"mesh is 4; give a mesh, such as Mesh\(dp_shard=4\)"),
        (lambda: shardlab.Plan(passes=cast(Any, {"bucket": 4})), 'give names in quotes, such as "prefetch,bucket=4"'),
        (lambda: Mesh(pp=cast(Any, "4")), "axis pp has '4' ranks; give a whole number"),
    ],
)
def test_a_mistake_raises_the_sentence_of_the_command(call: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        call()


def test_verify_takes_a_plan() -> None:
    verdict = shardlab.verify(shardlab.Plan(Mesh(pp=2)), steps=1, layers=2)
    assert verdict is not None
    assert verdict.ok


@pytest.mark.parametrize("result", [shardlab.trace, shardlab.check, shardlab.simulate])
def test_the_repr_of_a_result_is_one_short_line(result: Any) -> None:
    text = repr(result("1f1b", ranks=8, microbatches=32))
    assert "8 ranks" in text
    assert len(text) < 120


def test_a_refusal_is_shown_as_a_sentence_and_the_line_at_fault() -> None:
    lines, first = inspect.getsourcelines(keeps_own_gradient)
    (number,) = [first + at for at, line in enumerate(lines) if "rank.update" in line]
    with pytest.raises(Refused) as refusal:
        shardlab.check(keeps_own_gradient, ranks=2)
    sentence, line = refusal.value._render_traceback_()
    place = f"{Path(__file__).relative_to(Path.cwd())}:{number}"
    assert sentence.startswith(f"Refused: {place}: rank 0, op ")
    assert line == f"{place}:  {lines[number - first].strip()}"


def test_an_error_that_a_program_raises_is_shown_with_its_line_without_a_check() -> None:
    with pytest.raises(Refused) as refusal:
        shardlab.trace(divides_by_zero)
    sentence, line = refusal.value._render_traceback_()
    assert "the program raised ZeroDivisionError" in sentence
    assert line.endswith(":  print(1 // (len(rank.layers) - 4))")


def test_a_user_error_is_shown_as_a_sentence() -> None:
    with pytest.raises(UserError) as error:
        shardlab.check("fsdq")
    assert error.value._render_traceback_() == [f"UserError: {error.value}"]


def test_ipython_shows_a_sentence_and_no_traceback(tmp_path: Path) -> None:
    code = "import shardlab\nshardlab.check('fsdq')\n"
    command = [sys.executable, "-m", "IPython", "--colors=NoColor", f"--ipython-dir={tmp_path}", "-c", code]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    printed = process.stdout + process.stderr
    assert "UserError: there is no strategy 'fsdq'; did you mean fsdp?" in printed
    assert "Traceback" not in printed

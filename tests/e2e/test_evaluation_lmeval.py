"""``llorch eval --tasks``: lm-eval's own transformers model finds the same, and what is wrong is told.

Needs an interpreter with lm-eval, named by LLORCH_LMEVAL_PYTHON; ``ci/test-lmeval`` makes one and runs this.
"""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import REPOSITORY
from support.harness.processes import Outcome, WorkerProcess, environment, interpreter, llorch

pytestmark = pytest.mark.lmeval

EXAMPLE = REPOSITORY / "examples" / "lm_eval"
LIKELIHOODS = 1e-4
"""Of bits per byte: sums over many tokens, each as exact as the logits."""

RIVER = "Once upon a time there was a small house by the river.\n\nNobody lived in it, but {n} mice did. "
ROLLING = """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - {metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
  - {metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}
"""
SAID = """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 12}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
"""
CHOSEN = """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
fewshot_split: test
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
metadata: {version: 3}
"""


def write_task(folder: Path, name: str, body: str, lines: list[dict[str, Any]]) -> None:
    """Write a task and its questions; the file is named as the folder has it."""
    (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    head = f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {name}.jsonl}}}}\n"
    (folder / f"{name}.yaml").write_text(f"{head}test_split: test\n{body}")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a task of each kind."""
    folder = tmp_path_factory.mktemp("tasks")
    write_task(folder, "river", ROLLING, [{"text": RIVER.format(n=n) * 4 * n} for n in range(1, 5)])
    questions = [{"question": f"Number {n} is", "choices": [" odd", " even", " big"], "answer": n % 2}
                 for n in range(12)]  # fmt: skip
    write_task(folder, "numbers", CHOSEN, questions)
    said = [{"question": f"The capital of country {n} is", "answer": "x"} for n in range(6)]
    write_task(folder, "capitals", SAID, said)
    return folder


def evaluate(*arguments: object, **variables: str) -> Outcome:
    python = interpreter("LLORCH_LMEVAL_PYTHON", "ci/test-lmeval")
    return llorch("eval", *arguments, python=python, **{"HF_DATASETS_OFFLINE": "1", **variables})


def by_lm_eval(output: Path, folder: Path, names: str, model: str, at: Path) -> tuple[dict[str, Any], Path]:
    """Run lm-eval's own command and transformers model; return its results, and its folder of samples."""
    python = interpreter("LLORCH_LMEVAL_PYTHON", "ci/test-lmeval")
    flags = ("--model", "hf", "--model_args", model, "--tasks", names, "--device", "cpu")
    subprocess.run(
        [
            python,
            "-m",
            "lm_eval",
            "run",
            "--include_path",
            folder,
            *flags,
            "--output_path",
            output,
            "--log_samples",
        ],
        check=True,
        cwd=at,
        env=environment(HF_DATASETS_OFFLINE="1"),
        stdout=subprocess.DEVNULL,
    )
    [results] = output.rglob("results_*.json")
    return json.loads(results.read_text())["results"], results.parent


def values(document: dict[str, Any]) -> dict[str, Any]:
    return {f"{task['task']}.{one['name']}": one for task in document["tasks"] for one in task["metrics"]}


@pytest.mark.real_model
def test_lm_evals_own_transformers_model_finds_the_same(
    tmp_path: Path, smollm2_gguf: Path, smollm2: Callable[..., Path], tasks: Path
) -> None:
    for path in (*EXAMPLE.glob("*.yaml"), *EXAMPLE.glob("questions.*"), *tasks.iterdir()):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = f"pretrained={smollm2_gguf.parent},gguf_file={smollm2_gguf.name},dtype=float32"
    names = "llorch_everyday,river,capitals"
    theirs, samples = by_lm_eval(tmp_path / "theirs", tmp_path, names, weights, tmp_path)
    # What their model says becomes what ours is asked to say.
    [said] = samples.glob("samples_capitals_*.jsonl")
    lines = sorted(
        (json.loads(line) for line in said.read_text().splitlines()), key=lambda one: one["doc_id"]
    )
    answers = [one["filtered_resps"][0].strip() for one in lines]
    assert all(answers)
    write_task(
        tmp_path,
        "capitals",
        SAID,
        [{**one["doc"], "answer": answer} for one, answer in zip(lines, answers, strict=True)],
    )
    said_task = (tmp_path / "capitals.yaml").read_text()
    (tmp_path / "capitals.yaml").write_text(f"{said_task}filter_list:\n  - name: none\n    filter:\n      - "
                                            "{function: regex, regex_pattern: '^\\s*(.*?)\\s*$'}\n"
                                            "      - {function: take_first}\n")  # fmt: skip
    fp32 = smollm2("fp32")
    outcome = evaluate(fp32, "--tasks", names, "--task-folder", tmp_path, "--max-context", "2048", "--json")
    document = outcome.document()
    ours = values(document)
    for name in ("acc", "acc_norm"):
        assert ours[f"llorch_everyday.{name}"]["value"] == theirs["llorch_everyday"][f"{name},none"]
        stderr = theirs["llorch_everyday"][f"{name}_stderr,none"]
        assert ours[f"llorch_everyday.{name}"]["stderr"] == pytest.approx(stderr)
        assert len(ours[f"llorch_everyday.{name}"]["samples"]) == 50
    for name in ("word_perplexity", "bits_per_byte"):
        expected = theirs["river"][f"{name},none"]
        assert ours[f"river.{name}"]["value"] == pytest.approx(expected, rel=LIKELIHOODS)
    assert ours["capitals.exact_match"]["value"] == 1.0


def test_here_and_at_a_worker_tasks_find_the_same_in_every_run(
    tiny: Path, tiny_worker: WorkerProcess, tasks: Path
) -> None:
    flags = ("--tasks", "river,numbers,capitals", "--task-folder", tasks, "--json")
    first = evaluate(tiny, *flags)
    found = first.document()["tasks"]
    assert first.stderr == ""
    assert evaluate(tiny, *flags).document()["tasks"] == found
    assert evaluate("--connect", tiny_worker.address, *flags).document()["tasks"] == found
    assert [(task["task"], task["version"], task["n"], task["of"]) for task in found] == [  # type: ignore[index]
        ("river", None, 4, 4),
        ("numbers", "3", 12, 12),
        ("capitals", None, 6, 6),
    ]
    assert first.document()["lm_eval"]


def test_how_questions_are_asked_is_what_the_flags_say(tiny: Path, tasks: Path, tmp_path: Path) -> None:
    flags = (tiny, "--tasks", "numbers", "--task-folder", tasks, "--json")
    runs = [
        evaluate(*flags, *more).document()
        for more in ((), ("--limit", "4"), ("--limit", "0.5"), ("--fewshot", "2"), ("--chat-template",))
    ]
    [plain, few, share, shots, chat] = [document["tasks"][0] for document in runs]  # type: ignore[index]
    assert (few["n"], share["n"], few["of"]) == (4, 6, 12)
    assert (plain["shots"], shots["shots"]) == (0, 2)
    assert len({task["samples_sha256"] for task in (plain, few, share, shots, chat)}) == 5
    assert runs[4]["settings"] == {"limit": None, "fewshot": None, "chat_template": True}
    # The same questions, asked otherwise, are not compared.
    (tmp_path / "before.json").write_text(json.dumps(runs[0]))
    outcome = evaluate(*flags, "--fewshot", "2", "--baseline", tmp_path / "before.json")
    assert outcome.code == 2
    assert "shots: 0 in the baseline, 2 now" in outcome.error()


def test_limits_and_baselines_hold_for_tasks(tiny: Path, tasks: Path, tmp_path: Path) -> None:
    flags = (tiny, "--tasks", "numbers,river", "--task-folder", tasks, "--text", "sample")
    before = tmp_path / "before.json"
    before.write_text(evaluate(*flags, "--json").stdout)
    outcome = evaluate(
        *flags,
        "--baseline",
        before,
        "--fail-if-worse",
        "--at-least",
        "numbers.acc=1.01",
        "--at-most",
        "perplexity=1",
    )
    assert outcome.code == 1
    assert [line.partition(" is ")[0] for line in outcome.stderr.splitlines()] == [
        "error: numbers.acc", "error: perplexity",
    ]  # fmt: skip
    assert outcome.stdout.count("the same") == 4
    wrong = evaluate(*flags, "--at-least", "numbers.accuracy=0.5")
    assert wrong.code == 2
    assert "there is no such figure; found " in wrong.stderr


def test_a_data_set_that_is_not_there_is_named_and_found_in_a_folder(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tasks"
    folder.mkdir()
    head = "task: quiz\ndataset_path: acme/quiz\ntest_split: test\n"
    (folder / "quiz.yaml").write_text(head + CHOSEN)
    flags = (tiny, "--tasks", "quiz", "--task-folder", folder, "--json")
    outcome = evaluate(*flags)
    assert outcome.code == 7
    said = outcome.error()
    assert "the task quiz needs the data set acme/quiz, which is not on this machine" in said
    assert "hf download --repo-type dataset acme/quiz --local-dir DIR/acme/quiz" in said
    data = folder / "acme" / "quiz"
    data.mkdir(parents=True)
    (data / "test.jsonl").write_text(
        "".join(f'{{"question": "{n} is", "choices": [" a", " b"], "answer": 0}}\n' for n in range(5))
    )
    assert evaluate(*flags).document()["tasks"][0]["n"] == 5  # type: ignore[index]


def test_a_hub_that_cannot_be_reached_is_asked_once(tiny: Path, tmp_path: Path) -> None:
    head = "task: quiz\ndataset_path: acme/quiz\ntest_split: test\n"
    (tmp_path / "quiz.yaml").write_text(head + CHOSEN)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody listens
        outcome = evaluate(
            *(tiny, "--tasks", "quiz", "--task-folder", tmp_path),
            HF_ENDPOINT=f"http://127.0.0.1:{closed.getsockname()[1]}",
            HF_DATASETS_OFFLINE="0",
            HF_HUB_OFFLINE="0",
            HF_HOME=str(tmp_path / "home"),
        )
    assert outcome.code == 7
    said = outcome.error()  # one line: the client tells of every time that it asks again
    assert "the task quiz needs the data set acme/quiz, which is not on this machine" in said
    assert "Connection refused" in said


def test_tasks_that_draw_draw_the_same_and_a_group_is_a_figure_of_its_own(tiny: Path, tmp_path: Path) -> None:
    lines = [{"question": f"{n} is", "choices": [" odd", " even"], "answer": n % 2} for n in range(20)]
    for name in ("first", "second"):
        drawn = "process_docs: !function drawn.shuffled\nfewshot_config: {sampler: default}\nnum_fewshot: 2\n"
        write_task(tmp_path, name, CHOSEN + drawn, lines)
    (tmp_path / "drawn.py").write_text(
        "import random\ndef shuffled(docs):\n    order = list(range(len(docs)))\n    random.shuffle(order)\n"
        "    return docs.select(order)\n"
    )
    (tmp_path / "both.yaml").write_text(
        "group: both\ntask: [first, second]\n"
        "aggregate_metric_list:\n  - {metric: acc, weight_by_size: true}\n"
    )
    flags = (tiny, "--tasks", "both", "--task-folder", tmp_path, "--json")
    found = evaluate(*flags, "--at-least", "both.acc=0").document()["tasks"]
    assert evaluate(*flags).document()["tasks"] == found
    tasks = {task["task"]: task for task in found}  # type: ignore[attr-defined]
    assert set(tasks) == {"both", "first", "second"}
    assert tasks["first"]["samples_sha256"] != tasks["second"]["samples_sha256"]
    mean = (tasks["first"]["metrics"][0]["value"] + tasks["second"]["metrics"][0]["value"]) / 2
    assert tasks["both"]["metrics"][0]["value"] == pytest.approx(mean)
    twice = evaluate(tiny, "--tasks", "both,first", "--task-folder", tmp_path)
    assert (twice.code, "Duplicate task 'first'" in twice.error()) == (2, True)


@pytest.mark.parametrize(
    ("body", "code", "says"),
    [
        (
            "task: odd\ncustom_dataset: !function odd.load\noutput_type: generate_until\ntest_split: test\n"
            "doc_to_text: b\ndoc_to_target: c\nunsafe_code: true\n",
            2,
            "runs code that the model writes",
        ),
        ("task: [", 2, "does not have and no file in --task-folder defines"),
        ("task: odd\noutput_type: dancing\n", 2, "the task odd cannot be made: "),
        (
            "task: odd\ndataset_path: json\ndataset_kwargs: {data_files: none.jsonl}\n",
            7,
            "reads none.jsonl, which",
        ),
        (
            "task: odd\ncustom_dataset: !function odd.load\noutput_type: multiple_choice\ntest_split: test\n"
            'doc_to_text: "b"\ndoc_to_choice: "{{a}}"\ndoc_to_target: 0\n'
            "process_results: !function odd.broken\n",
            2,
            "lm-eval failed on odd with ZeroDivisionError",
        ),
    ],
)
def test_a_task_that_is_wrong_ends_with_one_line(
    tiny: Path, tmp_path: Path, body: str, code: int, says: str
) -> None:
    (tmp_path / "odd.yaml").write_text(body)
    (tmp_path / "odd.py").write_text(
        "import datasets\ndef load(**_):\n    print('on stdout')\n"
        "    return {'test': datasets.Dataset.from_list([{'a': ['x', 'y']}])}\n"
        "def broken(doc, results):\n    return {'acc': 1 // 0}\n"
    )
    outcome = evaluate(tiny, "--tasks", "odd", "--task-folder", tmp_path)
    assert outcome.code == code, outcome
    assert outcome.stdout == ""
    assert says in outcome.stderr.splitlines()[-1]

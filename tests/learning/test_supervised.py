"""Supervised steps: demonstrations, the loss against cross entropy, and runs that begin with them."""

import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from builders import CHAT_ML, TinyModel, changed, write_rows
from small_run import QUICKSTART, SMALL
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerBase as Tokenizer

from grpo_ray.cluster.local import calls_of
from grpo_ray.config import Config
from grpo_ray.config.learner import SftConfig
from grpo_ray.core.learner import Learner
from grpo_ray.learning.loading import load_policy
from grpo_ray.learning.model_files import load_tokenizer
from grpo_ray.learning.plain_chat import give_plain_chat
from grpo_ray.records.run_files import read_metrics
from grpo_ray.run import supervised
from grpo_ray.run.supervised import imitate, imitating
from grpo_ray.tasks.demonstrations import Demonstration, read_demonstrations
from grpo_ray.tasks.prompts import ChatTemplate, PromptTemplate, TextTemplate
from grpo_ray.tools.cli import main

USER, REPLY = {"role": "user", "content": "Sort 312"}, {"role": "assistant", "content": "It is 123"}
CHAT = ChatTemplate()
DEMONSTRATIONS = [
    Demonstration((5, 6, 7), (8, 9, 1)), Demonstration((5, 6), (9,)), Demonstration((7,), (4, 4, 4, 4, 1)),
]  # fmt: skip


# ---- demonstrations ----


@pytest.fixture(scope="module")
def tokenizer(tiny_model: TinyModel) -> Tokenizer:
    tokenizer = load_tokenizer(str(tiny_model()))
    tokenizer.chat_template = CHAT_ML
    return tokenizer


def read(
    folder: Path, tokenizer: Tokenizer, *rows: dict[str, Any],
    template: PromptTemplate | None = CHAT, **fields: Any,
) -> list[Demonstration]:  # fmt: skip
    sft, longest = SftConfig(path=write_rows(folder / "rows.jsonl", rows), **fields), 160
    return read_demonstrations(sft, template, tokenizer, (tokenizer.eos_token_id,), longest)


def texts(tokenizer: Tokenizer, demonstration: Demonstration) -> list[str]:
    return [tokenizer.decode(ids) for ids in demonstration]


def test_a_conversation_has_the_templates_tokens_up_to_the_end(tmp_path: Path, tokenizer: Tokenizer) -> None:
    system = {"role": "system", "content": "Be short."}
    found = read(
        tmp_path, tokenizer, {"messages": [USER, REPLY]}, {"prompt": "Sort 312", "response": "It is 123"},
        {"messages": [system, USER, REPLY, USER, REPLY]},
    )  # fmt: skip
    assert found[0] == found[1]
    assert texts(tokenizer, found[0]) == [
        "<|im_start|>user\nSort 312<|endoftext|>\n<|im_start|>assistant\n", "It is 123<|endoftext|>",
    ]  # fmt: skip
    whole = tokenizer.apply_chat_template([USER, REPLY])["input_ids"]
    assert [*found[0].prompt_token_ids, *found[0].response_token_ids] == whole[:-1]  # without a line's end
    prompt, response = texts(tokenizer, found[2])
    assert prompt.startswith("<|im_start|>system\nBe short.<|endoftext|>\n<|im_start|>user\nSort 312")
    assert prompt.count("It is 123") == 1  # earlier replies are no response
    assert response == "It is 123<|endoftext|>"
    rows = [
        {"prompt": "Sort 312", "response": "It is 123"},
        {"prompt": None, "response": None, "messages": [USER, REPLY]},  # as Parquet fills in what a row lacks
    ]
    given = read(tmp_path, tokenizer, *rows, template=ChatTemplate("Be short."))
    assert given[0] == given[1]
    assert texts(tokenizer, given[0])[0].startswith("<|im_start|>system\nBe short.")


def test_a_text_template_and_a_template_without_an_end_token(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"q": "Sort 312", "a": " 123"}
    fields = {"prompt_field": "q", "response_field": "a"}
    (plain,) = read(tmp_path, tokenizer, row, template=TextTemplate("Do: {question}"), **fields)
    assert texts(tokenizer, plain) == ["Do: Sort 312", " 123<|endoftext|>"]
    monkeypatch.setattr(tokenizer, "chat_template", CHAT_ML.replace("<|endoftext|>", ""))
    (made,) = read(tmp_path, tokenizer, {"messages": [USER, REPLY]})
    assert texts(tokenizer, made)[1] == "It is 123\n<|endoftext|>"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "a", "response": "b"}, "line 2: no field 'prompt'; .* question, response. Set sft"),
        ({"prompt": "a", "answer": "b"}, r"line 2: no field 'response'; .* Set sft.response_field"),
        ({"prompt": "a", "response": " "}, "line 2: 'response' is empty"),
        *(
            ({"messages": messages}, "line 2: 'messages' must end with a message of the user and")
            for messages in ([USER], "hello", [REPLY], [REPLY, REPLY])
        ),
        ({"messages": [USER, {**REPLY, "content": None}]}, r"'messages'\[1\] is .* a `content` of text"),
        ({"messages": [USER, {**REPLY, "tool_calls": [1]}]}, r"line 2: 'messages'\[1\] is .*nothing else"),
        ({"messages": [USER, REPLY], "tools": [{}]}, "line 2: 'tools' cannot be imitated, only text"),
        ({"prompt": "a" * 199, "response": "b"}, r"line 2: .* have \d+ tokens, but the model takes 160"),
    ],
)  # fmt: skip
def test_bad_rows_are_named(tmp_path: Path, tokenizer: Tokenizer, row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(tmp_path, tokenizer, {"prompt": "a", "response": "b"}, row)


def test_what_suits_no_file(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"sft.path: .*rows.jsonl holds no rows"):
        read(tmp_path, tokenizer)
    with pytest.raises(ValueError, match="line 1: the task has no template"):
        read(tmp_path, tokenizer, {"prompt": "a", "response": "b"}, template=None)
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(ValueError, match="line 1: 'messages' needs a model with a chat template"):
        read(tmp_path, tokenizer, {"messages": [USER, REPLY]}, template=TextTemplate("{question}"))
    last = "{{ messages[-1].content }}"  # as templates that drop earlier thoughts
    monkeypatch.setattr(tokenizer, "chat_template", last)
    with pytest.raises(ValueError, match="line 1: the chat template writes the conversation differently"):
        read(tmp_path, tokenizer, {"messages": [USER, REPLY]})


@pytest.mark.parametrize("share_prompts", ["auto", "never"])
def test_steps_equal_cross_entropy(tiny_config: Config, tiny_model: TinyModel, share_prompts: str) -> None:
    """A loop in plain torch: padded, with labels of -100, and the same optimizer and schedule."""
    folder = str(tiny_model())
    config = changed(
        tiny_config, sampling={"temperature": 0.5, "min_tokens": 3}, learner={"share_prompts": share_prompts},
        algorithm={"kl": {"reference": "initial", "coefficient": 1.0}},
    )  # fmt: skip
    imitator = imitating(config, 5, 3, learning_rate=1e-2, weight_decay=0.1, max_grad_norm=1e9)
    learner, losses = Learner(folder, imitator, (1,)), list[float]()
    imitate(calls_of(learner), DEMONSTRATIONS, imitator, lambda step, num_steps, loss: losses.append(loss))

    model = load_policy(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=imitator.learner.betas, weight_decay=0.1)
    width = max(sum(map(len, row)) for row in DEMONSTRATIONS)
    ids, labels = torch.zeros((3, width), dtype=torch.long), torch.full((3, width), -100)
    for row, (prompt, response) in enumerate(DEMONSTRATIONS):
        end = len(prompt) + len(response)
        ids[row, :end] = torch.tensor([*prompt, *response])
        labels[row, len(prompt) : end] = torch.tensor(response)
    expected = []
    for rate in (1e-2, 1e-2, 7.5e-3, 5e-3, 2.5e-3):  # a ramp of one step, then on a line towards 0
        optimizer.param_groups[0]["lr"] = rate
        logits = model(input_ids=ids, use_cache=False).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-4)
    assert losses[-1] < losses[0] - 1
    for own, theirs in zip(learner.model.parameters(), model.parameters(), strict=True):
        # AdamW divides by the gradient's size, so near 0 its rounding shows; each step moves 10 times this
        torch.testing.assert_close(own, theirs, rtol=1e-3, atol=2.5e-4)


def test_every_row_once_per_epoch_in_another_order() -> None:
    batches = supervised._batches([Demonstration((n,), (n,)) for n in range(10)], 4, "0")
    drawn = [row.prompt_token_ids[0] for _ in range(5) for row in next(batches)]
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == list(range(10))
    assert drawn[:10] != drawn[10:] != list(range(10))


Job = Callable[..., list[str]]
FIRST_STEP = "rollouts/step-000001.parquet"


@pytest.fixture
def job(tmp_path: Path, tiny_model: TinyModel) -> Job:
    """The arguments of a run of one step, with a model that answers anything and shall answer ` no`."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model(), model)
    tokenizer = load_tokenizer(str(model))
    give_plain_chat(tokenizer)
    tokenizer.save_pretrained(model)
    rows = [{"prompt": f"Sort {n}", "response": " no"} for n in range(100, 140)]
    write_rows(tmp_path / "demonstrations.jsonl", rows)

    def arguments(*overrides: str) -> list[str]:
        return [
            QUICKSTART, *SMALL, "model.tiny=null", f"model.path={model}", "algorithm.num_steps=1",
            f"sft.path={tmp_path}/demonstrations.jsonl", "sft.num_steps=30", "sft.batch_size=8",
            "sft.learning_rate=1e-2", "algorithm.kl.reference=initial", "weight_sync.max_lag=0",
            "sampling.min_tokens=0", f"run.output_dir={tmp_path}", "run.name=run", "--local", *overrides,
        ]  # fmt: skip

    return arguments


def responses_of(rollouts: Path) -> list[str]:
    texts: list[str] = pq.read_table(rollouts)["response"].to_pylist()
    return texts


@pytest.mark.slow
def test_a_run_begins_as_it_was_taught(job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, adapter = tmp_path / "run", tmp_path / "run" / "sft" / "adapter_model.safetensors"
    # Under frozen random embeddings no token becomes likelier than about 0.4.
    assert main(["sft", *job("model.adapter.rank=8", "sft.num_steps=40", "sampling.temperature=0.1")]) == 0
    assert "supervised steps; use it as model." in capsys.readouterr().out
    losses = [row["loss/nll"] for row in read_metrics(run / "sft" / "metrics.jsonl")]
    assert losses[-1] < 0.95 < 1 < losses[0]
    written = adapter.stat()
    again = ["model.adapter.rank=8", "sft.num_steps=40", "sampling.temperature=0.1", "run.if_exists=resume"]
    assert main(["sft", *job(*again)]) == 0  # as a scheduler submits it: nothing is left to do
    assert not (run / "metrics.jsonl").exists()
    assert main(["audit", str(run)]) == 0
    assert main(["resume", str(run), "--local", "sft.num_steps=9"]) == 2
    assert "sft.num_steps: this run has" in capsys.readouterr().err
    (tmp_path / "demonstrations.jsonl").unlink()

    assert main(["resume", str(run), "--local"]) == 0
    assert all(text.startswith(" no") for text in responses_of(run / FIRST_STEP))
    (row,) = read_metrics(run / "metrics.jsonl")
    assert row["loss/kl_ref_k3"] < 1e-6  # the reference is the taught model, too
    assert adapter.stat().st_mtime_ns == written.st_mtime_ns
    assert main(["audit", str(run)]) == 0
    out = ["--output", str(tmp_path / "evaluation")]
    assert main(["evaluate", str(run), "--checkpoint", "initial", "--limit", "4", "--local", *out]) == 0
    (responses,) = (tmp_path / "evaluation").rglob("*.parquet")
    assert all(text.startswith(" no") for text in responses_of(responses))


@pytest.mark.slow
def test_a_run_that_is_killed_in_its_supervised_steps_begins_them_anew(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(self: Learner, folder: Path) -> None:
        (folder / "half").touch()
        raise KeyboardInterrupt

    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Learner, "write_captured", interrupt)
        assert main(["train", *job()]) == 130
        ended = "interrupted; all actors have been ended; "
        assert f"{ended}resume with: grpo-ray resume {run}" in capsys.readouterr().err
        assert main(["sft", *job("run.if_exists=resume")]) == 130
    said, _, command = capsys.readouterr().err.partition("resume with: grpo-ray ")
    assert said.endswith(ended)
    assert not (run / "sft").exists()
    assert main(shlex.split(command)) == 0
    assert not (run / "metrics.jsonl").exists()  # nor does the command go on to GRPO
    assert main(["resume", str(run), "--local"]) == 0
    assert not (run / "sft" / "half").exists()
    assert {text.strip() for text in responses_of(run / FIRST_STEP)} == {"no"}
    (row,) = read_metrics(run / "metrics.jsonl")
    assert row["loss/kl_ref_k3"] < 1e-6  # the reference is the taught model, too
    assert read_metrics(run / "sft" / "metrics.jsonl")[-1]["loss/nll"] < 0.1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["learner.num_ranks=2"], "sft: supervised steps run on one rank, but learner.num_ranks is 2"),
        (["sft.path=missing.jsonl"], "missing.jsonl: there is no such file"),
        (["sft.prompt_field=question"], "no field 'question'; the fields are prompt, response"),
        (["model.path=null", "model.tiny={}"], "sft: a tiny model has a warm-up instead"),
    ],
)
def test_what_cannot_be_taught_is_refused_first(
    job: Job, overrides: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *(each for each in job(*overrides) if each != "--local")]) == 2
    assert message in capsys.readouterr().err


def test_a_configuration_without_demonstrations_has_no_sft(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sft", QUICKSTART]) == 2
    assert "has no section `sft`" in capsys.readouterr().err

"""`python -m examples.course data keywords`: generate a dataset from the options."""

import asyncio
import hashlib
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.progress import Progress

from examples.course.keyword_data.keyword_dataset import FEWEST_PAIRS, KeywordDataset, KeywordPair, has_keywords
from examples.course.keyword_data.options import KeywordOptions
from examples.course.keyword_data.writers import (
    AnswerWriter,
    TemplateWriter,
    default_prompt,
    model_config,
    start_model,
)
from grpo_ray.config.task import KeywordsTaskConfig
from grpo_ray.engines.base import EngineDied
from grpo_ray.errors import RunError, counted, shown_plainly
from grpo_ray.run.preparation import check_files
from grpo_ray.tasks.keywords import Keywords, make_example, read_words, task_keywords

AT_ONCE = 256  # prompts in the engine at a time


def make_keyword_dataset(options: KeywordOptions) -> None:
    """Write the dataset, or resume one that was interrupted.

    Raises:
        RunError: an option, the list, the model or the folder is wrong; the message says what to do.
        KeyboardInterrupt: Ctrl-C or SIGTERM; the message says what is kept.
    """
    with shown_plainly():
        task = _task(options)
        wanted = task_keywords(task, options.seed)
        start_writer = _checked_writer(options, task)
        dataset = KeywordDataset(options.output, _definition(options, task))
        if dataset.pairs:
            print(f"resuming with {counted(len(dataset.pairs), 'pair')} of {dataset.unfinished}")
        with dataset.lock():
            if left := [keywords for keywords in wanted if keywords not in dataset.pairs]:
                _run(dataset, left, start_writer(), options.max_attempts)
            num_train, num_validation = dataset.finish(wanted)
    print(f"{options.output}: {num_train:,} pairs in train.jsonl, {num_validation:,} in validation.jsonl")
    if dropped := len(wanted) - num_train - num_validation:
        attempts = counted(options.max_attempts, "attempt")
        print(f"{counted(dropped, 'prompt')} dropped: no answer had all of the keywords in {attempts}")


def _task(options: KeywordOptions) -> KeywordsTaskConfig:
    """Make the configuration of the generated task that supplies the prompts."""
    prompt = options.prompt or (default_prompt(options.model) if options.model else "question_only")
    if options.num_pairs < FEWEST_PAIRS:
        raise ValueError(f"--num-pairs: {options.num_pairs} is too few; a dataset needs {FEWEST_PAIRS}")
    return KeywordsTaskConfig(
        keywords_path=options.keywords,
        num_keywords=options.num_keywords,
        num_train_prompts=options.num_pairs - 1,  # split later, when it is known which prompts have an answer
        num_validation_prompts=1,
        prompt=prompt,
    )


def _checked_writer(options: KeywordOptions, task: KeywordsTaskConfig) -> Callable[[], AnswerWriter]:
    """Check that the writer can be started; return a function that starts it."""
    if options.model is None:
        return lambda: TemplateWriter(options.seed)
    sampling = options.temperature, options.max_tokens
    config = model_config(options.model, task, options.seed, *sampling, options.engine)
    data = check_files(config)
    return lambda: start_model(config, data)


def _definition(options: KeywordOptions, task: KeywordsTaskConfig) -> dict[str, Any]:
    """Return the settings that must be the same for an unfinished dataset to be resumed."""
    words = read_words(options.keywords)
    return {
        "num_pairs": options.num_pairs,
        "keywords_sha256": hashlib.sha256("\n".join(words).encode()).hexdigest(),
        "num_keywords": list(options.num_keywords),
        "seed": options.seed,
        **(_sampler(options, task) if options.model is not None else {}),
    }


def _sampler(options: KeywordOptions, task: KeywordsTaskConfig) -> dict[str, Any]:
    template = Path(task.prompt)
    return {
        "model": options.model,
        "prompt": template.read_text(encoding="utf-8") if template.is_file() else task.prompt,
        "temperature": options.temperature,
        "max_tokens": options.max_tokens,
        "engine": options.engine,
    }


def _run(dataset: KeywordDataset, left: Sequence[Keywords], writer: AnswerWriter, max_attempts: int) -> None:
    num_wanted = len(dataset.pairs) + len(left)
    kept = f"pairs are verified and kept in {dataset.unfinished}; run the same command to resume"
    try:
        asyncio.run(_write_all(dataset, left, writer, max_attempts))
    except asyncio.CancelledError:
        raise KeyboardInterrupt(f"{len(dataset.pairs):,} of {num_wanted:,} {kept}") from None
    except EngineDied as error:
        raise RunError(f"{error}; {len(dataset.pairs):,} of {num_wanted:,} {kept}") from error


async def _write_all(
    dataset: KeywordDataset, left: Sequence[Keywords], writer: AnswerWriter, max_attempts: int
) -> None:
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    room = asyncio.Semaphore(AT_ONCE)
    try:
        await writer.start()
        with Progress(disable=not sys.stdout.isatty()) as progress:
            bar = progress.add_task("prompts", total=len(left))

            async def write(keywords: Keywords) -> None:
                async with room:
                    await _write_one(dataset, keywords, writer, max_attempts)
                progress.advance(bar)

            await asyncio.gather(*map(write, left))
    finally:
        await writer.close()


async def _write_one(
    dataset: KeywordDataset, keywords: Keywords, writer: AnswerWriter, max_attempts: int
) -> None:
    """Try until an answer has the keywords, at most `max_attempts` times."""
    for _ in range(max_attempts):
        answer = await writer.write(keywords)
        if has_keywords(answer, keywords):
            dataset.add(KeywordPair(make_example(keywords).question, answer, keywords))
            return

"""The jobs that `grpo-ray submit` sends, follows and stops; Ray's job API is a fake here."""

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import ZipFile

import aiohttp
import pytest
import yaml
from commands import Capture, printed, refused
from small_run import QUICKSTART

from grpo_ray.cluster.ray_internals import forget_cached_token
from grpo_ray.config.loading import ConfigError, load_config
from grpo_ray.errors import INTERRUPTED, RunError
from grpo_ray.tools.submit import submission, submit
from grpo_ray.tools.submit.submission import SENT_ALONG, SubmissionContext, check_upload, training_job
from grpo_ray.tools.submit.submit import JobClient, check_token, job_address

HERE = "http://127.0.0.1:8265"
ELSEWHERE = "http://head.example:8265"


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (*SENT_ALONG, "RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://other.example:1")  # JobClient changes it
    monkeypatch.setenv("HOME", str(tmp_path))


def make_context(address: str = HERE, **others: Any) -> SubmissionContext:
    return SubmissionContext(address, Path.cwd(), **others)


@pytest.mark.slow
def test_a_training_job_names_its_run_and_every_word_arrives_as_it_is() -> None:
    """YAML would read the name as a number, and the folder's end as a comment, if they were not quoted."""
    overrides = ['run.name="007"', 'sampling.stop=["</answer>", "$(id)"]', 'run.output_dir="out #1"']
    job = training_job(QUICKSTART, overrides, make_context())
    run = Path.cwd() / "out #1" / "007"
    assert job.command == (
        sys.executable, "-m", "grpo_ray", "train", QUICKSTART, *overrides,
        f'run.output_dir="{run.parent}"', 'run.name="007"',
    )  # fmt: skip
    assert job.metadata == {"run": str(run), "config": QUICKSTART}
    there = subprocess.check_output(f"printf '%s\\0' {job.entrypoint}", shell=True, text=True)
    assert tuple(there.split("\0")[:-1]) == job.command  # as the cluster's shell reads it
    config = load_config(QUICKSTART, job.command[5:])
    assert (config.run.name, config.run.output_dir) == ("007", str(run.parent))
    assert make_context(ELSEWHERE).program[0] == "python"
    assert make_context(ELSEWHERE, python="/opt/grpo/bin/python").program[0] == "/opt/grpo/bin/python"
    # A run without a name gets one that the metadata knows.
    job = training_job(QUICKSTART, [], make_context())
    config = load_config(QUICKSTART, job.command[5:])
    assert str(config.run.name).startswith("quickstart-2")
    assert job.metadata["run"] == f"{config.run.output_dir}/{config.run.name}"
    with pytest.raises(RunError, match=r"run\.if_exists: `resume` needs run\.name"):
        training_job(QUICKSTART, ["run.if_exists=resume"], make_context())


@pytest.mark.slow
def test_only_named_variables_and_a_few_settings_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("GRPO_RAY_CACHE", "https://user:password@cache")  # looks like a credential: not sent
    monkeypatch.setenv("EXAMPLE_SETTING", "yours")
    monkeypatch.setenv("OTHER_API_KEY", "not listed")
    variables = training_job(QUICKSTART, [], make_context()).runtime_env["env_vars"]
    assert variables == {"HF_HUB_OFFLINE": "1", "RAY_JOB_STOP_WAIT_TIME_S": "60"}
    job = training_job(QUICKSTART, ["run.on_preemption_s=99.5"], make_context(env=["EXAMPLE_SETTING"]))
    variables = job.runtime_env["env_vars"]
    assert variables["EXAMPLE_SETTING"] == "yours"
    assert variables["RAY_JOB_STOP_WAIT_TIME_S"] == "130"  # 99.5 up, and 30 to end
    assert job.warnings == ()
    with pytest.raises(RunError, match="--env NOT_THERE: no such variable in this shell"):
        training_job(QUICKSTART, [], make_context(env=["NOT_THERE"]))
    page = Path("docs/cluster.md").read_text()
    assert [name for name in SENT_ALONG if f"`{name}`" not in page] == []
    # A secret that is listed is sent with a warning.
    monkeypatch.setenv("JUDGE_API_KEY", "mine")
    reward = "task.reward={reward: 'judges:judge', secrets: [JUDGE_API_KEY, NOT_THERE]}"
    job = training_job(QUICKSTART, [reward], make_context(env=["JUDGE_API_KEY"]))
    assert job.runtime_env["env_vars"]["JUDGE_API_KEY"] == "mine"
    assert "NOT_THERE" not in job.runtime_env["env_vars"]
    (warning,) = job.warnings
    assert "JUDGE_API_KEY looks like a credential" in warning
    assert "mine" not in job.entrypoint + warning


def write_files(folder: Path, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def packed(folder: Path, excludes: Sequence[str]) -> set[str]:
    """Return the files that Ray's own packaging takes from the folder."""
    from ray._private.runtime_env.packaging import create_package

    package = folder.parent / f"{folder.name}.zip"
    create_package(str(folder), package, include_gitignore=True, excludes=list(excludes))
    names = {name for name in ZipFile(package).namelist() if not name.endswith("/")}
    package.unlink()  # Ray would leave one that is there
    return {name.removeprefix(f"{folder.name}/") for name in names}


def listed(folder: Path, excludes: Sequence[str]) -> set[str]:
    return {str(path.relative_to(folder)) for path in submission.uploaded_files(folder, excludes)}


PEM = "-----BEGIN {}PRIVATE KEY-----\nMIIE\n-----END {}PRIVATE KEY-----\n"
CREDENTIAL_FILES = (
    ".ssh/id_rsa", ".ssh/config", "id_ed25519", "deploy/id_rsa", "ID_RSA", ".aws/credentials",
    ".git-credentials", ".npmrc", "web/.npmrc", ".pypirc", ".netrc", "_netrc", ".huggingface/token",
    ".cache/huggingface/token", ".cache/huggingface/stored_tokens", ".kube/config", ".docker/config.json",
    "sub/.docker/config.json", "me.p12", "me.PFX", "store.jks", "app.keystore", "putty.ppk", "key.pem",
    "tls/server.key", "service-account.json", "service-account-prod.json", "my-credentials.json",
    "application_default_credentials.json", "prod.env", ".env", ".env.local", ".envrc", ".auth_token",
    "auth_token", ".config/gcloud/credentials.db", ".azure/azureProfile.json", "secrets.yaml",
    "client_secret_1.json", "kubeconfig", "vault.kdbx", ".pgpass", "vendored/.git/config",
)  # fmt: skip
BY_CONTENT = {
    "notes": PEM.format("", ""),
    "data/old key [1].txt": PEM.format("OPENSSH ", "OPENSSH "),
    "rsa.txt": "\ufeff\n" + PEM.format("RSA ", "RSA "),
    "chain.crt": "-----BEGIN CERTIFICATE-----\nMIIE\n-----END CERTIFICATE-----\n" + PEM.format("EC ", "EC "),
    "bags.txt": "Bag Attributes\n    friendlyName: me\n" + PEM.format("ENCRYPTED ", "ENCRYPTED "),
    "p.txt": "PuTTY-User-Key-File-3: ssh-ed25519\n",
    "cloud.json": '{"type": "service_account", "project_id": "p", "private_key": "-----BEGIN"}',
    "adc.txt": '{"client_id": "c", "refresh_token": "r", "type": "authorized_user"}',
}
HARMLESS = {
    "mine.yaml": "",
    "src/secrets.py": "import secrets\n",
    "src/test_keys.py": f'KEY = """\n{PEM.format("", "")}"""\n',
    "README.md": f"A key begins like this:\n\n{PEM.format('', '')}",
    "ca.crt": "-----BEGIN CERTIFICATE-----\nMIIE\n-----END CERTIFICATE-----\n",
    "public.txt": "-----BEGIN PUBLIC KEY-----\nMIIE\n-----END PUBLIC KEY-----\n",
    "train.jsonl": '{"question": "what is a private_key?", "answer": "service_account"}\n',
    "model/tokenizer_config.json": '{"type": "x", "bos_token": "<s>"}',
    "model/special_tokens_map.json": "{}",
    "keyboard.py": "",
    "environment.yml": "name: base\n",
}


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory with credentials of every kind, and files that only resemble them."""
    folder = tmp_path / "work"
    write_files(folder, dict.fromkeys(CREDENTIAL_FILES, "") | BY_CONTENT | HARMLESS)
    write_files(folder, {"mine.yaml": Path(QUICKSTART).read_text()})
    monkeypatch.chdir(folder)
    return folder


def test_ray_uploads_neither_credentials_nor_runs_and_those_in_the_way_are_named(
    checkout: Path, tmp_path: Path, jobs: "FakeJobs", capsys: Capture
) -> None:
    """Ray's own packaging, on a folder like a checkout after some work; a link to a key is not followed."""
    heavy = [".venv/lib/a", "runs/a/metrics.jsonl", "o [1]/b/metrics.jsonl", "__pycache__/a.pyc", ".git/config"]
    wanted = ["grpo_ray/runs/code.py", "data/train.jsonl"]
    write_files(checkout, dict.fromkeys([*heavy, *wanted], ""))
    write_files(tmp_path, {"key": PEM.format("", "")})
    (checkout / "innocent").symlink_to(tmp_path / "key")
    job = training_job("mine.yaml", ["run.output_dir=o [1]"], make_context())
    expected = {*HARMLESS, *wanted}
    assert packed(checkout, job.runtime_env["excludes"]) == expected
    assert listed(checkout, job.runtime_env["excludes"]) == expected
    (checkout / "loop").symlink_to(checkout)
    with pytest.raises(RunError, match=r"loop leads back into .* without an end"):
        listed(checkout, job.runtime_env["excludes"])
    (checkout / "loop").unlink()
    for name in (*CREDENTIAL_FILES, *BY_CONTENT):
        if name not in ("prod.env", ".ssh/id_rsa", "cloud.json"):
            (checkout / name).unlink()
    (checkout / "bad\x1b[2J.pem").touch()
    lines = printed(capsys, "submit", "mine.yaml", "--no-wait").splitlines()
    (line,) = [line for line in lines if "not uploaded" in line]
    assert line.endswith(r": .ssh/id_rsa, bad\x1b[2J.pem, cloud.json, innocent, prod.env")
    (checkout / "cloud.json").rename(checkout / "data" / "task.jsonl")
    data = ["task={kind: file, train_path: data/task.jsonl, validation_path: data/task.jsonl}"]
    refused(capsys, "submit", "mine.yaml", "model.tiny=null", "model.path=model", *data)


def test_the_autoscaler_copies_no_credential_either() -> None:
    """Ray copies the cluster's token and its own SSH key by rsync as well, which some names would stop."""
    excluded = yaml.safe_load(Path("launch/cluster.yaml").read_text())["rsync_exclude"]
    left = [name for name in submission.CREDENTIALS if name not in excluded]
    assert left == ["auth_token", *[name for name in submission.CREDENTIALS if name.startswith("id_")], "*.pem"]


TREE = (
    "a.log", "keep.log", "data/a.log", "data/train.jsonl", "data/deep/x.txt", "data/deep/er/x.txt",
    "src/data/y.txt", "src/a.py", "build", "src/build/z.txt", "models/qwen/config.json",
    "models/qwen/.git/config", "#odd", "b c.txt",
)  # fmt: skip
PATTERNS = (
    ["*.log", "!keep.log"], ["!keep.log", "*.log"], ["data"], ["/data/"], ["*.jsonl", "*.log", "!data/"],
    ["/data", "!/data/train.jsonl"], ["data/*", "!data/train.jsonl"], ["data/**", "!data/train.jsonl"],
    ["data/*/"], ["src/build"], ["**/deep/x.txt"], ["data/**/x.txt"], ["src/**"],
    ["?.log", "[ab]*.txt  "], ["# a comment", "", "#odd", "*.py"], ["*", "!*/", "!*.py"],
)  # fmt: skip


@pytest.mark.parametrize("patterns", PATTERNS, ids=" ".join)
def test_the_files_that_are_checked_are_those_that_ray_uploads(tmp_path: Path, patterns: list[str]) -> None:
    folder = tmp_path / "work"
    write_files(folder, dict.fromkeys(TREE, ""))
    found = packed(folder, patterns)
    assert listed(folder, patterns) == found < set(TREE)
    for file in (".gitignore", ".rayignore", "src/.gitignore"):
        write_files(folder, {file: "\n".join(patterns)})
        assert listed(folder, []) == packed(folder, [])
        (folder / file).unlink()


def test_what_the_run_reads_is_uploaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Path("configs/qwen2.5-math-1.5b.yaml").read_text()
    write_files(tmp_path, dict.fromkeys(("mine.yaml", "experiments/mine.yaml"), config))
    names = ("data/train.jsonl", "kept/train.jsonl", "model/config.json", "model/model.safetensors")
    write_files(tmp_path, dict.fromkeys(names, "{}"))
    monkeypatch.chdir(tmp_path)

    def check(*overrides: str, config: str = "mine.yaml") -> None:
        check_upload(training_job(config, overrides, make_context()))

    data = ["task.train_path=data/train.jsonl", "task.validation_path=./kept/train.jsonl"]
    model = "model.path=model"
    check(*data, model)
    check(*data)  # the model is on the hub
    (tmp_path / ".gitignore").write_text("data/\n*.safetensors\n")
    with pytest.raises(RunError, match=r"^task\.train_path: data/train\.jsonl is not uploaded"):
        check(*data)
    with pytest.raises(RunError, match=r"^model\.path: model/model\.safetensors is not uploaded"):
        check(model)
    with pytest.raises(RunError, match=r"^sft\.path: data/train\.jsonl is not uploaded"):
        check("sft.path=data/train.jsonl", data[1])
    with pytest.raises(RunError, match=r"^CONFIG: experiments/mine\.yaml is not uploaded"):
        check(config="experiments/mine.yaml")
    check(f"task.train_path={tmp_path}/data/train.jsonl", data[1])  # the cluster may see it


def test_a_folder_that_is_too_large_says_what_is_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private.ray_constants import DASHBOARD_CLIENT_MAX_SIZE

    assert submission.LIMIT_BYTES == DASHBOARD_CLIENT_MAX_SIZE
    write_files(tmp_path, {"mine.yaml": Path(QUICKSTART).read_text(), "data/a": "", "data/b": ""})
    for name in ("a", "b"):
        os.truncate(tmp_path / "data" / name, 60 * 2**20)
    monkeypatch.chdir(tmp_path)
    job = training_job("mine.yaml", [], make_context())
    with pytest.raises(RunError, match=r"120 MiB would be .* at most 100 MiB; the largest: data \(120 MiB"):
        check_upload(job)
    (tmp_path / ".rayignore").write_text("/data/b\n")
    check_upload(job)


@pytest.mark.slow
def test_a_file_outside_of_the_working_directory(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(Path(QUICKSTART).read_text())
    assert str(file) in training_job(str(file), [], make_context()).command
    with pytest.raises(RunError, match=r"mine\.yaml is not in the working directory .* is sent to http://head"):
        training_job(str(file), [], make_context(ELSEWHERE))


def test_a_resumption_names_the_runs_folder(tmp_path: Path) -> None:
    where = SubmissionContext(HERE, tmp_path)
    run = tmp_path / "runs" / "a"
    write_files(run, {"config.yaml": Path(QUICKSTART).read_text()})
    job = submission.resumption_job("runs/a", ["algorithm.num_steps=80"], where)
    assert job.command[3:] == ("resume", str(run), "algorithm.num_steps=80")
    assert job.metadata["run"] == str(run)
    with pytest.raises(ConfigError, match="num_stepz"):
        submission.resumption_job("runs/a", ["algorithm.num_stepz=80"], where)


def test_the_address_is_a_dashboards(monkeypatch: pytest.MonkeyPatch) -> None:
    assert job_address(None) == HERE
    monkeypatch.setenv("RAY_ADDRESS", f"{ELSEWHERE}/")
    assert job_address(None) == ELSEWHERE
    assert job_address("https://other.example") == "https://other.example"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(RunError, match=r"RAY_ADDRESS is 10\.0\.0\.1:6379: jobs go to the dashboard"):
        job_address(None)


def test_without_a_token_nothing_goes_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    check_token(make_context())
    assert "RAY_AUTH_MODE" not in os.environ
    for mode in (None, "token"):
        with monkeypatch.context() as patch:
            if mode:
                patch.setenv("RAY_AUTH_MODE", mode)
            with pytest.raises(RunError, match=r"no token for http://head\.example:8265"):
                check_token(make_context(ELSEWHERE))
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    check_token(make_context(ELSEWHERE))
    for name, value in [("RAY_AUTH_TOKEN", "x"), ("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))]:
        monkeypatch.delenv("RAY_AUTH_MODE")
        (tmp_path / "token").write_text("x")
        monkeypatch.setenv(name, value)
        check_token(make_context(ELSEWHERE))
        assert os.environ["RAY_AUTH_MODE"] == "token"
        monkeypatch.delenv(name)


class FakeJobs:
    """A stand-in for Ray's JobSubmissionClient: jobs by id, which end when their output has been read."""

    def __init__(self, ending: str = "SUCCEEDED") -> None:
        self.ending, self.not_ready = ending, 0
        self.jobs: dict[str, Any] = {}
        self.output: list[str | BaseException] = ["step 1\n", "step 2\n"]
        self.stopped_by: BaseException | None = None
        self.accepted_by: BaseException | None = None

    def submit_job(self, **job: Any) -> str:
        if self.not_ready:
            self.not_ready -= 1
            raise RuntimeError("Request failed with status code 500: No available agent to submit job")
        self.jobs[job["submission_id"]] = SimpleNamespace(status=Status("RUNNING"), message="", **job)
        if self.accepted_by is not None:
            raise self.accepted_by
        return "job-1"

    def get_job_info(self, job_id: str) -> Any:
        if job_id not in self.jobs:
            raise RuntimeError(f"Request failed with status code 404: Job {job_id} does not exist")
        return self.jobs[job_id]

    def get_job_status(self, job_id: str) -> "Status":
        return self.get_job_info(job_id).status  # type: ignore[no-any-return]

    async def tail_job_logs(self, job_id: str) -> AsyncIterator[str]:
        for lines in self.output:
            if isinstance(lines, BaseException):
                raise lines
            yield lines
        self.jobs[job_id].status = Status(self.ending)

    def stop_job(self, job_id: str) -> bool:
        if self.stopped_by is not None:
            raise self.stopped_by
        was_running = self.jobs[job_id].status == "RUNNING"
        if was_running:
            self.jobs[job_id].status = Status("STOPPED")
        return was_running


class Status(str):
    def is_terminal(self) -> bool:
        return self != "RUNNING"


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeJobs:
    fake = FakeJobs()
    if Path("configs").exists():
        shutil.copytree("configs", tmp_path / "here/configs")
        monkeypatch.chdir(tmp_path / "here")  # where fewer files are looked through
    monkeypatch.setattr(submit, "_connect", lambda address: fake)
    monkeypatch.setattr(submit, "POLL_S", 0.0)
    monkeypatch.setattr(submit, "new_job_id", lambda: "job-1")
    return fake


@pytest.mark.slow
def test_submit_waits_for_a_head_and_follows_to_the_end(
    jobs: FakeJobs, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    jobs.not_ready = 2  # a head that is still starting
    shown = printed(capsys, "submit", QUICKSTART, "run.name=a", "--address", HERE)
    assert "step 1\nstep 2\njob job-1: succeeded\n" in shown
    assert f"run        {Path.cwd()}/runs/a\n" in shown
    assert "grpo-ray submit --stop job-1\n" in shown  # the default address
    assert os.environ["RAY_API_SERVER_ADDRESS"] == HERE  # not what the shell had
    sent = jobs.jobs["job-1"]
    assert shlex.split(sent.entrypoint)[3:5] == ["train", QUICKSTART]
    assert sent.metadata["run"] == f"{Path.cwd()}/runs/a"
    assert sent.runtime_env["working_dir"] == str(Path.cwd())
    jobs.not_ready = 9
    monkeypatch.setattr(submit, "STARTING_S", 0.0)
    assert f"grpo-ray: {HERE}: the head node accepts no jobs" in refused(capsys, "submit", QUICKSTART)


@pytest.mark.slow
def test_a_failed_jobs_output_is_shown_not_obeyed(jobs: FakeJobs, capsys: Capture) -> None:
    hostile = "\x1b]52;c;ZXZpbA==\x07 \x9b2J \r \u202e"
    shown = r"\x1b]52;c;ZXZpbA==\x07 \x9b2J \r \u202e"
    jobs.output, jobs.ending = [f"step 1 {hostile}\n"], "FAILED"
    printed(capsys, "submit", QUICKSTART, "--no-wait")
    jobs.jobs["job-1"].message = f"exit code 2 {hostile}, last available logs (20,000 chars):\nstep 1\n"
    output = printed(capsys, "submit", "--follow", "job-1", status=1)
    assert output.endswith(f"step 1 {shown}\njob job-1: failed: exit code 2 {shown}\n")


@pytest.mark.slow
def test_ctrl_c_stops_following_only(jobs: FakeJobs, capsys: Capture) -> None:
    jobs.output = ["step 1\n", KeyboardInterrupt()]
    assert "the job keeps running" in refused(capsys, "submit", QUICKSTART, status=INTERRUPTED)
    assert jobs.jobs["job-1"].status == "RUNNING"
    jobs.output = ["step 2\n"]
    assert "step 2\n" in printed(capsys, "submit", "--follow", "job-1")
    jobs.accepted_by = KeyboardInterrupt()  # after the request, before its answer
    message = refused(capsys, "submit", QUICKSTART, status=INTERRUPTED)
    assert "may have been submitted; see with: grpo-ray submit --follow job-1" in message


@pytest.mark.slow
def test_stop_says_how_to_go_on(jobs: FakeJobs, capsys: Capture) -> None:
    assert "step 1" not in printed(capsys, "submit", QUICKSTART, "--no-wait", "run.name=a")
    resume = f"resume it, if it had begun, with: grpo-ray submit --resume {Path.cwd()}/runs/a\n"
    assert f"job job-1: stopped\n{resume}" in printed(capsys, "submit", "--stop", "job-1")
    # A second time there is nothing to do.
    assert printed(capsys, "submit", "--stop", "job-1") == "job job-1: stopped\n"
    jobs.stopped_by = KeyboardInterrupt()
    assert "no longer waiting" in refused(capsys, "submit", "--stop", "job-1", status=INTERRUPTED)


@pytest.mark.slow
@pytest.mark.parametrize("how", [[RuntimeError("closed with close code 1006")], []])
def test_a_lost_connection_ends_no_job(jobs: FakeJobs, capsys: Capture, how: list[str | BaseException]) -> None:
    jobs.output, jobs.ending = ["step 1\n", *how], "RUNNING"
    again = "the job keeps running; follow it again: grpo-ray submit --follow job-1"
    assert again in refused(capsys, "submit", QUICKSTART)
    jobs.output = [aiohttp.ClientError("the head node ends")]
    words = f"{HERE} no longer answers; .* submit --follow job-1; if .* submit --resume {Path.cwd()}/runs/"
    assert re.search(words, refused(capsys, "submit", "--follow", "job-1", status=1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "submit takes CONFIG, --resume RUN, --follow JOB or --stop JOB"),
        (["configs/none.yaml"], "configs has: "),
        ([QUICKSTART, "model.tiny=null", "model.path=./none"], "./none"),
        (["--follow", "job-9"], "Job job-9 does not exist"),
        (["--follow", "job-1", "--no-wait", "--env", "A"], "leave out --no-wait --env"),
        ([QUICKSTART, "--address", "http://"], "give its address, such as http://HOST:8265"),
        ([QUICKSTART, "--stop", "job-1"], "take a job's id and nothing else"),
        (["--resume", "runs/none"], "no run in runs/none: it has no config"),
        ([QUICKSTART, "--address", "head:6379"], "--address is head:6379: jobs go to the dashboard"),
    ],
)
def test_a_mistake_submits_nothing(jobs: FakeJobs, capsys: Capture, arguments: list[str], message: str) -> None:
    if "job-9" in arguments:
        jobs.output = [aiohttp.ClientError("404, as if there were no server")]  # as Ray raises it
    assert message in refused(capsys, "submit", *arguments)
    assert jobs.jobs == {}


@pytest.mark.slow
def test_files_of_the_cluster_alone(jobs: FakeJobs, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    data = ["task.train_path=/none/train.jsonl", "task.validation_path=/none/test.jsonl"]
    words = ["submit", "configs/qwen2.5-math-1.5b.yaml", *data, "--no-wait"]
    assert "/none/train.jsonl" in refused(capsys, *words)  # the cluster is this machine
    assert jobs.jobs == {}
    for there in (["--address", ELSEWHERE], ["--python", "python"]):  # the latter behind a tunnel
        shown = printed(capsys, *words, *there)
        assert "! task.train_path: /none/train.jsonl is not on this machine" in shown
        assert ("--address" in there) == (f"--stop job-1 --address {ELSEWHERE}" in shown)


@pytest.mark.parametrize(("proxy", "words"), [("", ""), ("http://127.0.0.1:1", " through a proxy .*")])
def test_a_head_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, proxy: str, words: str) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)  # Ray's client asks for a token first
    monkeypatch.setenv("http_proxy", proxy)
    for name in ("no_proxy", "NO_PROXY"):  # which a chat server of a test before this one sets
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(submit, "ANSWER_S", 0.1)
    forget_cached_token()  # of a test before this one
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(RunError, match=f"no Ray dashboard answers at {address}{words};"):
            JobClient(address)

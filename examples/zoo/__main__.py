"""Play the whole zoo: `python -m examples.zoo`. It prints what each animal showed, and the three rates."""

import argparse
import re
import sys
import tempfile
from pathlib import Path
from statistics import median

from examples.zoo.good import targets
from grpo_ray.tools.preflight.command import PreflightOptions
from grpo_ray.tools.preflight.preflight import Preflight, preflight

FOLDER = Path(__file__).parent
GAME = "grpo_ray.episodes.guess_number:episode"  # is played with the broken templates


def broken(half: str) -> dict[str, dict[str, str]]:
    """Return the arguments of `preflight` for each animal of a half, `known` or `unseen`."""
    found: dict[str, dict[str, str]] = {}
    for path in sorted((FOLDER / half).iterdir()):
        if path.suffix == ".jinja":
            found[path.stem] = {"target": GAME, "template": str(path)}
        elif path.suffix == ".py" and path.stem != "__init__":
            is_episode = re.search(r"^(?:async def episode\(|episode = )", path.read_text(), re.M)
            kind = "episode" if is_episode else "reward"
            found[path.stem] = {"target": f"examples.zoo.{half}.{path.stem}:{kind}"}
    return found


def good(folder: Path) -> dict[str, dict[str, str]]:
    """Return the arguments of `preflight` for each animal without a fault; configurations go to the folder."""
    found = {name: {"target": target} for name, target in targets(folder).items()}
    for name, arguments in found.items():
        if arguments["target"].endswith(".yaml") and name != "sorting":  # their model is on a hub
            arguments["template"] = str(FOLDER / "good/chat.jinja")
    return found


def play(title: str, animals: dict[str, dict[str, str]]) -> list[Preflight]:
    """Play the animals, print a line for each, and return what was found."""
    print(f"{title}:")
    results = []
    for name, arguments in animals.items():
        found = preflight(PreflightOptions(**arguments))  # type: ignore[arg-type]
        results.append(found)
        faults = ", ".join(each.name for each in found.faults) or "no fault"
        print(f"  {name:<32} {found.seconds:5.1f} s  {faults}", flush=True)
    return results


def main() -> int:
    """Return 1 if an animal with a fault passes, or one without does not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=["known", "unseen", "good"])
    parts = parser.parse_args().parts
    with tempfile.TemporaryDirectory() as folder:
        results = {part: play(part, good(Path(folder)) if part == "good" else broken(part)) for part in parts}
    missed = 0
    for part, found in results.items():
        with_faults = sum(bool(each.faults) for each in found)
        said = "false alarms" if part == "good" else "caught"
        missed += with_faults if part == "good" else len(found) - with_faults
        seconds = median(each.seconds for each in found)
        print(f"{part}: {with_faults} of {len(found)} {said}; median {seconds:.1f} s")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())

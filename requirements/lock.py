"""Write requirements with the hashes of the files that pip takes for them on this machine, as pip's own lock.

    python requirements/lock.py requirements/cpu.txt requirements/dev.txt >locked.txt
    pip install --no-deps --require-hashes -r locked.txt

The first command trusts the indexes once; from then on, here and on machines of the same kind, pip refuses
any other file. Options after `--` go to pip, such as `-- --find-links FOLDER`.
"""

import json
import subprocess
import sys


def main(arguments: list[str]) -> None:
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    files, options = arguments[:cut], arguments[cut + 1 :]
    if not files or "--help" in files:
        sys.exit(__doc__)
    asked = [word for file in files for word in ("-r", file)]
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet"]
    done = subprocess.run([*pip, "--report", "-", *asked, *options], stdout=subprocess.PIPE)
    if done.returncode:
        sys.exit(done.returncode)
    for item in sorted(json.loads(done.stdout)["install"], key=lambda item: item["metadata"]["name"].lower()):
        about = item["metadata"]
        digest = item["download_info"]["archive_info"]["hashes"]["sha256"]
        print(f"{about['name']}=={about['version']} --hash=sha256:{digest}")


if __name__ == "__main__":
    main(sys.argv[1:])

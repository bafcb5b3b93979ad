"""Print one of the two commands of the README, so that CI runs what people are told to run."""

import pathlib
import re
import sys

wanted = sys.argv[1]
text = pathlib.Path(__file__).resolve().parent.parent.joinpath("README.md").read_text(encoding="utf-8")
commands = dict(re.findall(r"<!-- command: (\w+) -->\n```sh\n(.+?)\n```", text, re.DOTALL))
if wanted not in commands:
    sys.exit(f"README.md has no command marked '<!-- command: {wanted} -->'; it has: {', '.join(commands) or 'none'}")
print(commands[wanted])

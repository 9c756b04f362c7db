"""Reads cargo's build messages and prints `BINARY FOLDER` for each test binary of a package (and test target)."""

import json
import os
import sys

package, target = sys.argv[1], sys.argv[2]
for line in sys.stdin:
    message = json.loads(line) if line.startswith("{") else {}
    if message.get("reason") != "compiler-artifact" or not message["profile"]["test"] or not message["executable"]:
        continue
    folder = os.path.dirname(message["manifest_path"])
    with open(message["manifest_path"]) as manifest:
        if f'name = "{package}"' not in manifest.read().splitlines():
            continue
    if target == package and "lib" not in message["target"]["kind"]:
        continue
    if target and target != package and message["target"]["name"] != target:
        continue
    print(message["executable"], folder)

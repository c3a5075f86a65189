"""Questions and answers about Python, from the help texts that every Python brings, as a file for supervised fine-tuning.

python examples/conversations.py conversations.jsonl
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

LONGEST = 600  # characters of an answer


def conversations() -> Iterator[dict[str, Any]]:
    """A conversation for each topic of Python's `help()`."""
    for name, text in sorted(topics.items()):
        title, *paragraphs = [" ".join(p.split()) for p in text.split("\n\n") if set(p.strip()) - set("*=-~^ \n")]
        answer = ""
        for paragraph in paragraphs:
            if len(answer) + len(paragraph) > LONGEST:
                break
            answer += paragraph + "\n"
        if answer:
            question = f"What does Python's documentation say about {title.strip('* ').split(' *')[0].lower()} ({name})?"
            yield {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer.strip()}]}


def main() -> None:
    """Write them to the file that is named."""
    lines = [json.dumps(talk, ensure_ascii=False) for talk in conversations()]
    Path(sys.argv[1]).write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines)} conversations in {sys.argv[1]}")


if __name__ == "__main__":
    main()

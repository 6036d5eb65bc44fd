"""The syntax tree of a program's text, bounded before it is parsed."""

from __future__ import annotations

import ast
import io
import re
import tokenize
import unicodedata

from coda_agent.primitives.errors import Fault, TextError

# The largest known programs have 1,700 characters, 43 tokens a statement and 4 open brackets.
MAX_CHARACTERS = 40_000
_MAX_TOKENS = 400  # a statement, which bounds how deep its tree is
_MAX_BRACKETS = 32
_COOKIE = re.compile(r"[ \t\f]*#.*?coding[:=]")  # PEP 263


def parse(text: str) -> ast.Module:
    """Parse a text.

    CPython 3.11's parser recurses in C, and a small thread's stack ends before its own limit:
    5000 signs in a row are a segmentation fault in 256 KiB.

    Raises:
        TextError: it is too long or too deep, no Python, or holds what editors do not show.
    """
    if len(text) > MAX_CHARACTERS:
        message = f"the candidate has {len(text)} characters, at most {MAX_CHARACTERS} are read"
        raise _error(message, 1, "a program is a few lines; compose what the vocabulary offers")
    text = text.replace("\r\n", "\n")
    for number, line in enumerate(text.split("\n"), 1):
        for c in line if not line.isprintable() else "":
            if c != "\t" and unicodedata.category(c)[0] == "C":
                hint = "take out control, invisible and half characters"
                raise _error(f"character U+{ord(c):04X} may not stand here", number, hint)
        if number <= 2 and _COOKIE.match(line):
            # Read from a file, the text would be decoded to another program than is read here.
            raise _error("an encoding declaration", number, "a candidate is UTF-8; take it out")
    line = 1
    opened: list[tuple[str, int]] = []
    try:
        tokens = 0
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            line = token.start[0]
            tokens = 0 if token.type == tokenize.NEWLINE else tokens + 1
            if token.type == tokenize.OP and token.string in "([{":
                opened.append((token.string, line))
            elif token.type == tokenize.OP and token.string in ")]}":
                if not opened:
                    message = f"not Python: {token.string!r} closes nothing"
                    raise _error(message, line, "take it out, or open it before")
                bracket, opened_in = opened.pop()
                if bracket + token.string not in ("()", "[]", "{}"):
                    message = f"not Python: {bracket!r} is closed by {token.string!r}"
                    raise _error(message, opened_in, "close it before")
            if tokens > _MAX_TOKENS or len(opened) > _MAX_BRACKETS:
                raise _error(
                    "this statement is too long or too deep", line, "give parts of it names"
                )
        return ast.parse(text)
    except (SyntaxError, tokenize.TokenError, ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, tokenize.TokenError) and opened:
            bracket, line = opened[-1]
            raise _error(f"not Python: {bracket!r} is never closed", line, "close it") from None
        reason = error.args[0] if error.args else "nested too deeply"
        line = getattr(error, "lineno", None) or line
        hint = "mend this line, or what is open before it"
        raise _error(f"not Python: {reason}", line, hint) from None


def _error(message: str, line: int, hint: str) -> TextError:
    return TextError.of([Fault(message, line, hint)])


def program_names(text: str) -> list[str]:
    """List a text's functions in order; none where it does not parse."""
    try:
        return [s.name for s in parse(text).body if isinstance(s, ast.FunctionDef)]
    except TextError:
        return []

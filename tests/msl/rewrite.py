"""From preprocessed Metal to clang's C++ for OpenCL: a few rules on tokens; lines keep their numbers."""

import re

SPACES = {"device": "__global", "constant": "__constant", "threadgroup": "__local", "thread": "__private"}
SCALARS = ("bool", "char", "uchar", "short", "ushort", "int", "uint", "long", "ulong", "half", "float", "bfloat")
VECTORS = {f"{scalar}{n}" for scalar in SCALARS for n in (2, 3, 4)}
TOKEN = re.compile(
    r"""(?P<line>^[ \t]*\#[^\n]*)|(?P<string>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|(?P<name>[A-Za-z_]\w*)
    |(?P<number>(?:0[xX][\da-fA-F.]+(?:[pP][+-]?\d+)?|(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\w*)
    |(?P<space>\s+)|(?P<punctuation>\[\[|\]\]|::|->|.)""",
    re.VERBOSE | re.MULTILINE | re.DOTALL,
)
STATEMENT_STARTS = {None, ";", "{", "}", ")", ":"}


def rewrite(text: str) -> str:
    return _Rewriter([(m.lastgroup, m.group()) for m in TOKEN.finditer(text)]).run()


def pointers_without_space(text: str) -> list[str]:
    """Declarations that Metal refuses and clang takes: `float* p`, `thread` or the like forgotten."""
    names = [(m.group(), m.start()) for m in TOKEN.finditer(text) if m.lastgroup not in ("space", "line")]
    words = [word for word, _ in names]
    declared = {b for a, b in zip(words, words[1:], strict=False) if a in ("typename", "class", "struct", "using")}
    types = set(filter(str.isidentifier, declared)).union(
        SCALARS, VECTORS, ("void", "auto"), re.findall(r"\b(?:u?int\d+|b?float16)_t\b", text)
    )
    found, start = [], 0
    for i, word in enumerate(words):
        if word in ("(", ",", ";", "{", "}", "<", ">", "=", "return"):
            start = i + 1
        elif word in ("*", "&") and words[i - 1] in types and not SPACES.keys() & set(words[start:i]):
            at = names[i][1]
            found.append(text[text.rfind("\n", 0, at) + 1 : text.find("\n", at)].strip())
    return found


class _Rewriter:
    def __init__(self, tokens: list[tuple[str, str]]):
        self.tokens = tokens
        self.out: list[str] = []
        self.last: str | None = None  # the last token that is neither space nor a line marker
        self.variables = 0
        self.classes: set[str] = set()

    def run(self) -> str:
        at = 0
        while at < len(self.tokens):
            at = self.step(at)
        return "".join(self.out)

    def step(self, at: int) -> int:
        kind, text = self.tokens[at]
        if kind in ("space", "line"):
            self.out.append(text)
            return at + 1
        if text == "[[":
            if self.next(at + 1)[1] == "function_constant":
                self.emit("= 0")
            return self.drop(at, self.close(at, "[[", "]]"))
        starts = self.last in STATEMENT_STARTS
        if text == "template" and self.next(at + 1)[1] == "[[":  # template [[host_name("...")]] ...;
            return self.drop(at, next(i for i in range(at, len(self.tokens)) if self.tokens[i][1] == ";"))
        if text == "threadgroup" and starts and (end := self.threadgroup_variable(at)):
            return end
        if text in ("constant", "constexpr") and starts and self.is_constant_table(at):
            self.emit("static ")
        if text in ("struct", "class"):
            self.classes.add(self.next(at + 1)[1])
        if text == "thread" and self.last in (")", "const", "noexcept") and self.makes_temporaries(at):
            return self.emit("", at)
        if text in VECTORS and self.last != "operator" and self.next(at + 1)[1] == "(":
            return self.emit(f"msl_make<{text}>", at)
        if text == "vec" and self.next(at + 1)[1] == "<":
            end = self.close(self.next(at + 1)[0], "<", ">")
            if self.next(end + 1)[1] == "(" and self.last != "operator":
                inside = rewrite("".join(t for _, t in self.tokens[at : end + 1]))
                self.emit(f"msl_make<{inside}>", at)
                return end + 1
        if text == "static_cast":
            return self.emit("msl_cast", at)
        if text == "kernel":
            return self.emit("", at)
        if kind == "name":
            return self.emit(SPACES.get(text, text), at)
        if kind == "number" and text.endswith("bf") and not text.startswith(("0x", "0X")):
            return self.emit(f"((bfloat){text[:-2]}f)", at)
        return self.emit(text, at)

    def emit(self, text: str, at: int = -1) -> int:
        self.out.append(text)
        if at >= 0:
            self.last = self.tokens[at][1]
        return at + 1

    def drop(self, at: int, end: int) -> int:
        self.out.append("\n" * sum(t.count("\n") for _, t in self.tokens[at : end + 1]))
        return end + 1

    def next(self, at: int) -> tuple[int, str]:
        while at < len(self.tokens) and self.tokens[at][0] in ("space", "line"):
            at += 1
        return at, self.tokens[at][1] if at < len(self.tokens) else ""

    def close(self, at: int, opening: str, closing: str) -> int:
        depth = 0
        for i in range(at, len(self.tokens)):
            depth += (self.tokens[i][1] == opening) - (self.tokens[i][1] == closing)
            if depth == 0:
                return i
        raise SyntaxError(f"no {closing} for {opening}")

    def makes_temporaries(self, at: int) -> bool:
        """Does `thread` qualify a constructor or a conversion? Clang's temporaries are in no __private space."""
        depth, words = 0, []
        while at > 0 and len(words) < 2:
            at -= 1
            kind, text = self.tokens[at]
            depth += (text == ")") - (text == "(")
            if kind == "name" and depth == 0 and text not in ("const", "noexcept", "constexpr"):
                words.append(text)
            elif words and kind == "punctuation":
                break
        return words[:1] != [] and (words[0] in self.classes or "operator" in words)

    def declaration(self, at: int) -> tuple[list[list[str]], int]:
        """The declarators' tokens of the statement at `at`, split at its commas, up to its ; or whatever ends it."""
        parts: list[list[str]] = [[]]
        depth = 0
        while at < len(self.tokens):
            kind, text = self.tokens[at]
            if kind not in ("space", "line"):
                depth += (text in "([{<" and len(text) == 1) - (text in ")]}>" and len(text) == 1)
                if depth < 0 or (depth == 0 and text in (";", "=", "*", "&", "{")) or text == "(" and depth == 1:
                    parts[-1].append(text)
                    return parts, at
                if depth == 0 and text == ",":
                    parts.append([])
                else:
                    parts[-1].append(text)
            at += 1
        return parts, at

    def threadgroup_variable(self, at: int) -> int:
        """threadgroup T x[N], y; -> references into the threadgroup's memory; 0 if it is something else."""
        parts, end = self.declaration(at + 1)
        if parts[-1][-1:] != [";"]:
            return 0
        parts[-1].pop()
        first = parts[0]
        dims = next((i for i in range(len(first)) if first[i] == "[" and first[i - 1] != "["), len(first))
        kind, names = " ".join(first[: dims - 1]), [first[dims - 1 :], *parts[1:]]
        if not kind:
            return 0
        kind = rewrite(kind)
        for name, *size in names:
            self.variables += 1
            self.emit(f"auto& {name} = msl_variable<{kind}{' '.join(size)}, {self.variables}>();")
        self.last = ";"
        return self.drop(at, end)

    def is_constant_table(self, at: int) -> bool:
        parts, end = self.declaration(at)
        return "constant" in parts[0] and self.tokens[end][1] in ("=", "{") and "static" not in parts[0]

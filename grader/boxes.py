r"""
Finds the boxed answer in a text: last_box(r"so \boxed{\frac12}.") is r"\frac12".

Completions and MATH's solutions put their answers in boxes.
"""
import re

BOX = r"\\(?:boxed|fbox)(?![A-Za-z])\s*"
BOX_OR_BRACE = re.compile(BOX + r"\{?|[{}]")
# As in TeX, \boxed 7 and \boxed\frac12 need no braces. But whether \boxed 72 is 7 or 72 is unclear.
GROUP = r"\s*(?:[0-9A-Za-z]|\{[^{}]*\})"
BARE = re.compile(rf"-?[0-9A-Za-z](?![0-9A-Za-z^_!%/:+*-]|[.,][0-9])"
                  rf"|\\(?:[dt]?frac{GROUP}{GROUP}|sqrt{GROUP}|pi\b)")
# \{ and \} are text, not braces. \\ is a line break, except in \\boxed, which was escaped twice.
ESCAPED = re.compile(r"\\\\(?!boxed|fbox)|\\[{}]")
# What may separate boxes that form one answer, as in "\boxed{2} and $y=\boxed{3}$". After prose, a
# period or a line break, only the last box is the answer.
JOINER = re.compile(r"""(?: [ ,;$&] | \\q?quad | \\[,;:!\ ()\[\]] | and | or
    | \\(?:text|mbox|textrm)\s*\{[\s,]*(?:and|or)?[\s,]*\}
    | [A-Za-z](?:_\{?\w{1,3}\}?)?\s*= )*""", re.VERBOSE)
# Words before or after a box (here #) that negate it: "It is not \boxed{5}", "\boxed{5} is wrong".
DENIED = re.compile(r"""(?: \b(?:not|never|cannot|neither|nor) | n['’]t | \\neq? | ≠ )
    (?: \s+ (?:be|equals?|to|the|an?|answer|value|really|certainly|simply|just|exactly) )*
    [\s$(\[{\\:]* \#
    | \# [\s$)\]}\\,]* (?:(?:which|that|it)\s+)? (?:
        (?:(?:is|was|seems) (?:n['’]t|\s+not) | (?:cannot|can['’]t)\s+be)
        (?:\s+(?:the|an?|my|final))*
        \s+ (?:answer|solution|correct|right|valid|true|possible|it)
      | (?:is|was|seems) \s+ (?:wrong|incorrect|false|invalid|impossible) ) \b""",
                    re.VERBOSE | re.IGNORECASE)


def last_box(text: str) -> str:
    """The content of the last closed, nonempty box, or "". Neighboring boxes become one list, and a
    negated box gets a "not".
    """
    found = []  # contents and the words between them, from right to left
    begin = None  # where the box to the right begins
    last = 0  # where the last box ends
    for start, content, end in sorted(complete_boxes(text), reverse=True):
        if not text[content:end].strip():
            continue
        if begin is not None:
            between = text[end:begin].removeprefix("}")
            if end > begin or len(between) > 80 or not JOINER.fullmatch(between):
                break
            either = re.search(r"(?<![a-z])or(?![a-z])", between)
            found.append(" or " if either else " , ")
        found.append(text[content:end])
        last = last or end
        begin = start
    if found and DENIED.search(f"{text[max(0, begin - 60):begin]}#{text[last:last + 60]}"):
        found.append("not ")
    return "".join(reversed(found)).strip()


def complete_boxes(text: str) -> list[tuple[int, int, int]]:
    """(start, start of content, end of content) of each closed box, in linear time."""
    found = []
    opened = []  # for each open brace: the start of its box and of the content, or None
    masked = ESCAPED.sub("##", text)
    for part in BOX_OR_BRACE.finditer(masked):
        if part[0] == "}":
            box = opened.pop() if opened else None
            found += [(*box, part.start())] if box else []
        elif part[0].endswith("{"):
            opened.append(part.span() if len(part[0]) > 1 else None)
        elif bare := BARE.match(masked, part.end()):
            found.append((part.start(), *bare.span()))
    return found

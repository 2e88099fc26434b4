r"""
Finds the boxes of a text: last_box(r"so \boxed{\frac12}.") is r"\frac12".

Completions and the worked solutions of MATH have their answers in there.
"""
import re

BOX = r"\\(?:boxed|fbox)(?![A-Za-z])\s*"
BOX_OR_BRACES = re.compile(BOX + r"|\{+|\}+")
# \{ and \} are text, not braces, and so is the second backslash of a line break; but \\boxed in a
# text that was escaped twice is a box.
ESCAPED = re.compile(r"\\\\(?!boxed|fbox)|\\[{}]")
BARE_WORD = re.compile(r"[-\w.,/]*\w")  # the 5 of "\boxed 5"
# What may stand between two boxes that are one answer, as in "\boxed{2} and $y=\boxed{3}$".
# Prose, a full stop or a line break make the last box the answer.
JOINER = re.compile(r"""(?: [ ,;$&] | \\q?quad | \\[,;:!\ ()\[\]] | and | or
    | \\(?:text|mbox|textrm)\s*\{[\s,]*(?:and|or)?[\s,]*\}
    | [A-Za-z](?:_\{?\w{1,3}\}?)?\s*= )*""", re.VERBOSE)
# What negates a box (here #), before or after it: "It is not \boxed{5}", "\boxed{5} is wrong".
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
    """Content of the last complete, non-empty box, or ""; neighbouring boxes become one list."""
    found = []  # contents and what joins them, from the right
    begin = None  # of the box to the right
    last = 0  # the end of the last box
    for start, content, content_end, end in sorted(complete_boxes(text), reverse=True):
        if not text[content:content_end].strip():
            continue
        if begin is not None:
            between = text[end:begin]
            if end > begin or len(between) > 80 or not JOINER.fullmatch(between):
                break
            either = re.search(r"(?<![a-z])or(?![a-z])", between)
            found.append(" or " if either else " , ")
        found.append(text[content:content_end])
        last = last or end
        begin = start
    if len(set(found[::2])) == 1:
        found = found[:1]
    if found and DENIED.search(f"{text[max(0, begin - 60):begin]}#{text[last:last + 60]}"):
        found.append("not ")
    return "".join(reversed(found)).strip()


def complete_boxes(text: str) -> list[tuple[int, int, int, int]]:
    r"""(start, start of the content, end of the content, end) of each box that closes, and of each
    "\boxed 5".

    One pass over the runs of braces, because 100,000 nested ones are a known attack. `depth` counts
    the open braces; a box is closed when it falls back to what it was outside of the box.
    """
    found = []
    opened = []  # boxes: braces outside, start, start of the content
    depth = 0
    masked = ESCAPED.sub("##", text)
    first = re.search(BOX, text)
    for part in BOX_OR_BRACES.finditer(masked, first.start() if first else len(text)):
        start, end = part.span()
        if part[0][0] == "{":
            depth += end - start
        elif part[0][0] == "}":
            depth -= end - start
            while opened and opened[-1][0] >= depth:
                outside, box_start, content = opened.pop()
                close = end - 1 - (outside - depth)  # of this box: a run may close several
                found.append((box_start, content, close, close + 1))
        elif masked.startswith("{", end):
            opened.append((depth, start, end + 1))
        elif part[0][-1].isspace():
            word = BARE_WORD.match(text, end)
            if word:
                found.append((start, *word.span(), word.end()))
    return found

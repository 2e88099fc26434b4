r"""
Finds the boxed answer in a text: last_box(r"so \boxed{\frac12}.") is r"\frac12".

Completions and the solutions in MATH put their answers into boxes.
"""
import re

BOX = r"\\(?:boxed|fbox)(?![A-Za-z])\s*"
BOX_OR_BRACES = re.compile(BOX + r"|\{+|\}+")
# \{ and \} are text, not braces. \\ is a line break, except in \\boxed, which was escaped twice.
ESCAPED = re.compile(r"\\\\(?!boxed|fbox)|\\[{}]")
BARE_WORD = re.compile(r"[-\w.,/]*\w")  # the 5 of "\boxed 5"
# What may separate boxes that are one answer, as in "\boxed{2} and $y=\boxed{3}$". After prose, a
# full stop or a line break only the last box is the answer.
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
    """The content of the last box that is closed and not empty, or "". Neighboring boxes become one
    list, and a negated box gets a "not".
    """
    found = []  # contents and the words between them, from right to left
    begin = None  # where the box to the right begins
    last = 0  # where the last box ends
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
    r"""(start, start of content, end of content, end) of each closed box and each "\boxed 5".

    A single pass over runs of braces: a text may have 100,000 nested ones.
    """
    found = []
    opened = []  # of each open box: depth outside, start, start of the content
    depth = 0  # open braces; a box closes when it is back at the depth outside
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
                close = end - 1 - (outside - depth)  # one run may close several boxes
                found.append((box_start, content, close, close + 1))
        elif masked.startswith("{", end):
            opened.append((depth, start, end + 1))
        elif part[0][-1].isspace():
            word = BARE_WORD.match(text, end)
            if word:
                found.append((start, *word.span(), word.end()))
    return found

"""
Finds loads that race with stores in a Triton kernel's PTX. Running the kernel does not show them reliably: comparing
the bits of two runs may pass hundreds of times.

Triton often lets several warps load the same element and one of them store it. If the program overwrites what it read,
a slow warp may load what a fast one has already stored. A barrier between the two prevents that, or one thread that
does both.
"""
import re

ACCESS = re.compile(r"(?:@(!?%p\d+) )?(ld|st)\.global\S* .*?\[ *(%\w+) *\+? *(-?\d+)? *\]")
ADDRESS = re.compile(r"(?:@!?%p\d+ )?(?:cvta|add|sub|mov|mad)\.\S+ (%\w+), (.*)")    # one address from another


def races(ptx: str) -> list[str]:
    """-> pairs of a load and a store of one buffer, in either order, with no barrier between them. Pairs at one place
    by the same threads do not count.
    """
    pointers = set(re.findall(r"\.param \.u64 \.ptr .* (\w+)[,\n]", ptx))
    buffers = {}                                 # register -> the pointers from which its address is computed
    since_barrier, found = [], []
    for line in ptx.splitlines():
        line = re.sub(r"\s+", " ", line.split("//")[0]).strip()
        if parameter := re.match(r"ld\.param\.\S+ (%\w+), \[(\w+)\]", line):
            buffers[parameter[1]] = {parameter[2]} & pointers
        elif re.match(r"(@!?%p\d+ )?bar(rier)?\.(?!warp)", line):       # bar.warp.sync holds one warp only
            since_barrier = []
        elif access := ACCESS.match(line):
            predicate, kind, register, offset = access.groups()
            place = predicate, register, offset
            buffer = buffers.get(register, set())
            found += [f"{earlier} / {line}" for other, before, where, earlier in since_barrier
                      if buffer & before and other != kind and where != place]
            since_barrier.append((kind, buffer, place, line))
        elif computed := ADDRESS.match(line):
            sources = re.findall(r"%\w+", computed[2])
            buffers.setdefault(computed[1], set()).update(*(buffers.get(source, ()) for source in sources))
    return found

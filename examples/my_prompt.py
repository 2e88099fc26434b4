"""
A custom prompt: two worked examples before each question, as earlier turns.

    python train.py --model qwen2.5-7b --prompt-style my_prompt:few_shot

The function gets a problem's fields, a dict with at least id, question and answer. It returns the
user's turn as text or, as here, a conversation that ends with it.
"""
EXAMPLES = {
    "Tom has 3 boxes with 4 pens each and sells 5 pens. How many pens are left?":
        "3 boxes with 4 pens are 3 * 4 = 12 pens, and 12 - 5 = 7. \\boxed{7}",
    "Ann buys 2 of 8 cards and then half of the others. How many cards does she have?":
        "8 - 2 = 6 cards are left, half of them is 3, and 2 + 3 = 5. \\boxed{5}",
}


def few_shot(problem: dict) -> list[dict]:
    turns = [("system", "Solve the problem step by step. Put the final answer within \\boxed{}.")]
    for question, answer in EXAMPLES.items():
        turns += [("user", question), ("assistant", answer)]
    turns.append(("user", problem["question"]))
    return [{"role": role, "content": text} for role, text in turns]

#!/usr/bin/env bash
# The runs that would decide what study/README.md leaves open, as they are started on one H200.
#
#     M05=... M15=... DATA=... bash study/runs.sh ORDER [SEED ...]
#
# M05, M15: folders of the 16-bit 0.5B and 1.5B. DATA: a folder with gsm8k_train.jsonl and
# gsm8k_test.jsonl. WORK (default: runs/study): where runs and 4-bit models go; what is there is not
# made again. ORDER is that of the section "What is open" of study/README.md, which has the
# predictions and the primary comparison of each:
#
#     0   no training: the sampler's entropy in every format, with every noise      20 minutes
#     1   noise that is as large as rounding, 0.5B                                  10 a seed
#     2   16 bits and calibrated, each at two learning rates, 0.5B                  10 a seed
#     5   what the recipe owes to its parts, 1.5B                                   16 a seed
#
# The minutes are by arithmetic. 25 minutes of a card hold the two seeds "0 1" of orders 1 and 2, or
# one of order 5. All arms of a seed run side by side, so that whatever the card does hits all alike.
#
# Training takes the first 6,473 problems of the training file. The last 1,000 are held out: what to
# run or to keep is chosen by `eval_accuracy`, which is theirs. The test is answered once, at the
# end, greedily and with 8 answers at temperature 1; `study.results verdicts` refuses a second time.
set -euo pipefail
cd "$(dirname "$0")/.."
order=${1:?ORDER: 0, 1, 2 or 5}
seeds=("${@:2}")
[ "$order" = 0 ] || : "${seeds[0]:?give the seeds, 0 1 for example}"
WORK=${WORK:-runs/study}
mkdir -p "$WORK"

# -- The problems and the 4-bit models -----------------------------------------

if [ ! -e "$WORK/choose.jsonl" ]; then
    head -n -1000 "$DATA/gsm8k_train.jsonl" > "$WORK/learn.jsonl"
    tail -n 1000 "$DATA/gsm8k_train.jsonl" > "$WORK/choose.jsonl"
fi
TEST=$DATA/gsm8k_test.jsonl

# converted NAME SOURCE FLAG ...: makes $WORK/NAME from the 16-bit folder SOURCE
converted() {
    [ -e "$WORK/$1/config.json" ] || python -m tools.convert nvfp4 "$2" "$WORK/$1" "${@:3}"
}

# -- Runs ----------------------------------------------------------------------

COMMON="--data $WORK/learn.jsonl --eval-data $WORK/choose.jsonl --eval-problems 0 --eval-every 1000
    --max-new-tokens 512 --max-rows 512 --memory-gib 33 --steps 60 --calibrate 0"
names=()

# start ARM SEED MODEL FLAG ...: trains in the background
start() {
    names+=("$1-s$2")
    train train.py --model "$3" $COMMON --seed "$2" --out "$WORK/$1-s$2" "${@:4}"
}

# train PROGRAM FLAG ...
train() {
    python "$@" > "$WORK/${names[-1]}.log" 2>&1 &
}

# finish: waits for the runs that were started, tests them once, and keeps what the tables need
finish() {
    wait
    for name in "${names[@]}"; do
        tested "$name" "$WORK/$name" &
    done
    wait
    for name in "${names[@]}"; do                # one after the other: all write the same files
        python -m study.results keep "$WORK/$name" "$name"
        python -m study.results verdicts "$name" "$WORK/$name".{greedy,sampled}.jsonl
    done
    names=()
}

# tested NAME RUN FLAG ...: answers the test problems greedily and 8 times at temperature 1
tested() {
    python evaluate.py "$2" "${@:3}" --data "$TEST" --max-rows 512 --out "$WORK/$1.greedy.jsonl"
    python evaluate.py "$2" "${@:3}" --data "$TEST" --max-rows 512 --out "$WORK/$1.sampled.jsonl" \
        --samples 8 --temperature 1 --top-p 1
}

# before ARM ...: the test of the untrained model that these arms share
before() {
    [ -e "$WORK/$1.sampled.jsonl" ] && return
    tested "$1" "$WORK/$1-s${seeds[0]}" --adapter none
    for arm in "$@"; do
        python -m study.results verdicts "$arm" "$WORK/$1".{greedy,sampled}.jsonl
    done
}

# -- The orders ----------------------------------------------------------------

case $order in
0)
    for size in 0.5b 1.5b; do
        source=$([ $size = 0.5b ] && echo "$M05" || echo "$M15")
        converted $size-nearest "$source" --codes nearest
        converted $size-search "$source"
        converted $size-calibrated "$source" --calibrate 128 --data "$WORK/learn.jsonl"
        for base in bf16 nf4 nearest search calibrated; do
            case $base in bf16 | nf4) model=$source format=$base ;;
                          *) model=$WORK/$size-$base format=nvfp4 ;; esac
            python -m study.entropy --model "$model" --base $format --data "$TEST" \
                --name $size-$base --out "$WORK/sampler.jsonl"
        done
    done
    python -m study.results sampler "$WORK/sampler.jsonl" ;;
1)
    converted 0.5b-nearest "$M05" --codes nearest
    for seed in "${seeds[@]}"; do
        model=$WORK/0.5b-nearest
        start noise-none "$seed" "$model" --sigma-start 0
        start noise-truncate "$seed" "$model" --sigma-start 5e-2 --correction truncate
        start noise-off "$seed" "$model" --sigma-start 5e-2 --correction off
        start noise-gain "$seed" "$model" --sigma-start 7e-2 --noise gain --correction off
        finish
    done
    before noise-none noise-truncate noise-off noise-gain
    python -m study.results tables noise-none noise-truncate noise-off noise-gain \
        --primary noise-off ;;
2)
    converted 0.5b-calibrated "$M05" --calibrate 128 --data "$WORK/learn.jsonl"
    for seed in "${seeds[@]}"; do
        for lr in 1e-4 2e-4; do
            start rate-bf16-$lr "$seed" "$M05" --base bf16 --sigma-start 0 --lr $lr
            start rate-calibrated-$lr "$seed" "$WORK/0.5b-calibrated" --sigma-start 0 --lr $lr
        done
        finish
    done
    before rate-bf16-1e-4 rate-bf16-2e-4
    before rate-calibrated-1e-4 rate-calibrated-2e-4
    # What the rate of each format is chosen by: accuracy on the 1,000 held-out problems.
    for format in bf16 calibrated; do
        python -m study.results pairs eval_accuracy rate-$format-2e-4:rate-$format-1e-4 \
            --last-common 1
    done ;;
5)
    converted 1.5b-calibrated "$M15" --calibrate 128 --data "$WORK/learn.jsonl"
    for seed in "${seeds[@]}"; do
        model=$WORK/1.5b-calibrated
        start recipe-divided "$seed" "$model" --sigma-start 0
        start recipe-cosine "$seed" "$model" --sigma-start 0 --advantage-scale none
        start recipe-bound "$seed" "$model" --sigma-start 0 --advantage-scale none \
            --max-grad-norm 0.006
        names+=("recipe-beta2-s$seed")           # no flag has Adam's second beta
        train -c 'import train, learner; learner.AdamW.BETAS = 0.9, 0.95; train.main()' \
            --model "$model" $COMMON --seed "$seed" --out "$WORK/recipe-beta2-s$seed" \
            --sigma-start 0 --advantage-scale none
        finish
    done
    before recipe-divided recipe-cosine recipe-bound recipe-beta2
    python -m study.results tables recipe-divided recipe-cosine recipe-bound recipe-beta2 \
        --primary recipe-cosine ;;
*)
    echo "ORDER $order: 0, 1, 2 or 5" >&2
    exit 1 ;;
esac

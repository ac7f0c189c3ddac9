# Source on the GPU machine: unpacks the parts of bundle.sh in the folders named, each once, and puts them on the path.
# SITE: where to, a folder outside of the checkout.
SITE=${SITE:-/tmp/sglang_site}
mkdir -p "$SITE"
for part in "$@"; do
  for archive in "$part"/*.tar.xz; do
    done="$SITE/.$(basename "$archive")"
    [ -e "$done" ] || (xz -dc "$archive" | tar -C "$SITE" -xf - && touch "$done") &
  done
done
wait
python3 -m compileall -q -j 0 "$SITE" > /dev/null 2>&1 || true
case ":${PYTHONPATH:-}:" in *":$SITE:"*) ;; *) export PYTHONPATH=$PWD:$PWD/reference:$SITE${PYTHONPATH:+:$PYTHONPATH} ;; esac
export FLASHINFER_CUDA_ARCH_LIST=9.0a OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1

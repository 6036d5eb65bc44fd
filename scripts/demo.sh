#!/usr/bin/env bash
# demo.sh BIN: from a spec to an accepted kernel, in a scratch workspace that is left behind for you to look at.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

root=$PWD bin=$1 kernel=gemm_rmsnorm_swiglu
export PATH="$bin:$PATH"
work=$(mktemp -d "${TMPDIR:-/tmp}/coda-agent-demo.XXXXXX")

step() { printf '\n==> %s\n' "$*"; }
run() {
    printf '$ %s\n' "$*"
    "$@"
}

# Accepting a kernel makes a commit, so git needs a name. The scratch repository gets one only where you have none.
lend_identity=false
if ! git config user.name >/dev/null || ! git config user.email >/dev/null; then
    lend_identity=true
    export GIT_AUTHOR_NAME="coda-agent demo" GIT_AUTHOR_EMAIL="demo@localhost"
    export GIT_COMMITTER_NAME="$GIT_AUTHOR_NAME" GIT_COMMITTER_EMAIL="$GIT_AUTHOR_EMAIL"
fi

step "1/4 A workspace: any git repository with specs/, generated/ and logs/"
run coda-agent init "$work"
cd "$work"
if $lend_identity; then
    git config user.name "$GIT_AUTHOR_NAME"
    git config user.email "$GIT_AUTHOR_EMAIL"
fi
cp "$root/specs/$kernel.md" specs/
echo "specs/$kernel.md is copied in: the mathematics, the shapes, and a PyTorch reference."

step "2/4 From the spec to an accepted kernel (the composer is the author: offline, no key, no cost)"
run coda-agent generate "specs/$kernel.md" --author composer

step "3/4 What was accepted, and on what evidence"
run coda-agent show "$kernel"

step "4/4 The commit it was accepted with"
run git --no-pager log --stat -1

cat <<END

Where to look next (this folder is yours; delete it when you are done):
  cd $work
  generated/$kernel/kernel.py        the program: a few lines of Python
  generated/$kernel/evidence.json    every check that was made, and on what machine
  $bin/coda-agent explain $kernel --stage ptx
                                     the same kernel as program, cute, ptx or sass
  $root/README.md
END
if ! nvidia-smi -L 2>/dev/null | grep -q GPU; then
    cat <<END

Not shown, because this machine has no GPU: the kernel running, its numerics on the device, and its speed. The level
above says how far it got; on a Hopper machine, \`coda-agent verify $kernel\` takes it further.
END
fi

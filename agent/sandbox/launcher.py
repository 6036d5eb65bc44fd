"""What stands between the judge and a child: starts it, confines it, and ends its whole tree.

Run by path as `python -I -S launcher.py ROLE ...`, so that it starts in some 10 ms: it imports the
standard library only, and not this package.

- `supervise` is the parent of a child's tree and its subreaper, so no double fork or new session
  leaves the tree. It ends the tree when the child ends and when its lifeline closes.
- `confine` puts the process it becomes under Landlock, seccomp or both.
"""

import ctypes
import os
import resource
import select
import signal
import struct
import sys
import time

_libc = ctypes.CDLL(None, use_errno=True)
_SELF = (sys.executable, "-I", "-S", __file__)
_STATM = "CODA_AGENT_STATM"  # the variable with the descriptor of /proc/self/statm
PARENT_DEATH_SIGNAL, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38


def supervised(command: list[str], lifeline: int, limits: dict[str, int | None]) -> list[str]:
    """The command that runs `command` under this file's `supervise`."""
    set_ = [f"{name}={value}" for name, value in limits.items() if value is not None]
    return [*_SELF, "supervise", f"lifeline={lifeline}", *set_, "--", *command]


def confined(command: list[str], rules: dict[str, list[str]]) -> list[str]:
    """The command that runs `command` under seccomp, and under Landlock where there are `rules`."""
    named = [f"{kind}={path}" for kind, paths in rules.items() for path in paths]
    return [*_SELF, "confine", *named, "--", *command]


def prctl(option: int, value: int) -> None:
    """prctl(2) with one argument."""
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl {option}")


def be_subreaper() -> None:
    """Orphans below this process become its children instead of init's."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with(parent: int) -> None:
    """This process is killed when `parent`, which forked it, ends, or has ended already."""
    prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def hide_from_children() -> None:
    """No process of the same user may look into this one, trace it, or open its descriptors."""
    prctl(_PR_SET_DUMPABLE, 0)


def below(root: int) -> list[int]:
    """The live processes that descend from `root`."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
            except OSError:  # it ended meanwhile
                continue
            # A zombie's children have gone to its subreaper.
            if state not in (b"Z", b"X"):
                children.setdefault(int(parent), []).append(int(name))
    found, todo = [], [root]
    while todo:
        found += (new := children.get(todo.pop(), []))
        todo += new
    return found


def kill_below(root: int) -> None:
    """Kill everything that descends from `root`, until nothing does."""
    # Twice: a walk misses a process whose parent ends during it.
    while pids := below(root) or below(root):
        # All are stopped first: what is stopped cannot fork while the others are killed.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    continue
        time.sleep(0.002)


def _supervise(lifeline: int, limits: dict[str, int | None], command: list[str]) -> int:
    be_subreaper()
    # The end of a child must interrupt the wait for the lifeline.
    waker, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    folder = os.environ.get("TMPDIR", "/tmp")  # tempfile takes longer to import than this to run
    private = f"{folder}/coda-agent-{os.getpid()}-{time.time_ns():x}"
    os.mkdir(private, 0o700)
    own, pid = os.getpid(), os.fork()
    if pid == 0:
        os.setsid()
        die_with(own)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for fd in (lifeline, waker, wake):
            os.close(fd)
        _limit(limits)
        _please_kill_first()
        os.environ["TMPDIR"] = private
        os.execv(command[0], command)
    kept = sorted((2, lifeline, waker, wake))
    for low, high in zip(kept, [*kept[1:], 1 << 20], strict=True):
        os.closerange(low + 1, high)  # the child's pipes end where the child ends
    status: int | None = None
    try:
        while status is None:
            ready, _, _ = select.select([lifeline, waker], [], [])
            if lifeline in ready:
                break
            os.read(waker, 4096)
            status = _reap(pid)
    finally:
        kill_below(os.getpid())
        ended = _reap(pid)
        _remove(private)
    code = os.waitstatus_to_exitcode(status if status is not None else ended or 0)
    return code if code >= 0 else 128 - code


def _remove(folder: str) -> None:
    try:
        os.rmdir(folder)
    except OSError:
        import shutil  # only where there is something to remove

        shutil.rmtree(folder, ignore_errors=True)


def _reap(pid: int) -> int | None:
    """Reap whatever has ended; the status of `pid` if it is among them."""
    found = None
    while True:
        try:
            ended, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if ended == 0:
            return found
        if ended == pid:
            found = status


def _limit(limits: dict[str, int | None]) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for name, number in (
        ("address_space_bytes", resource.RLIMIT_AS),
        ("file_bytes", resource.RLIMIT_FSIZE),
        ("open_files", resource.RLIMIT_NOFILE),
        ("processes", resource.RLIMIT_NPROC),
    ):
        if (value := limits.get(name)) is not None:
            hard = resource.getrlimit(number)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(number, (value, value))
    os.nice(limits.get("niceness") or 0)


_FILE_CAPABILITIES = 0b1111  # chown, dac_override, dac_read_search, fowner


def _keep_capabilities(kept: int) -> None:
    """Of root's capabilities only those of the bits `kept`."""
    version_3 = struct.pack("Ii", 0x20080522, 0)
    found = ctypes.create_string_buffer(24)  # effective, permitted, inheritable: low words, high
    if _libc.capget(version_3, found):
        raise OSError(ctypes.get_errno(), "capget")
    kept &= struct.unpack("6I", found.raw)[1]
    if _libc.capset(version_3, struct.pack("6I", kept, kept, 0, 0, 0, 0)):
        raise OSError(ctypes.get_errno(), "capset")


def _please_kill_first() -> None:
    """When memory runs out, the kernel ends this process rather than the judge."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:  # some containers have no such file
        return


# seccomp(2), by machine: the audit architecture, then system calls by number. Denied in a sandbox:
# socket, ptrace, process_vm_readv, process_vm_writev, mount, umount2, pivot_root, bpf,
# perf_event_open, userfaultfd, add_key, request_key, keyctl, unshare, setns, kexec_load,
# kexec_file_load, init_module, finit_module, delete_module, open_by_handle_at, reboot; and, with
# one number everywhere, io_uring_setup, open_tree, move_mount, fsopen, pidfd_getfd, mount_setattr.
# Denied to a candidate too: clone, execve, execveat, kill, tkill, tgkill, rt_sigqueueinfo,
# rt_tgsigqueueinfo, setpgid, setsid, fork, vfork; whatever changes a folder, without which a kernel
# that lacks Landlock lets it exchange cached objects: truncate, rename, renameat, renameat2, mkdir,
# mkdirat, rmdir, creat, link, linkat, unlink, unlinkat, symlink, symlinkat, mknod, mknodat; and
# everywhere pidfd_send_signal, pidfd_open, openat2. The calls that open take their flags in the
# argument at that offset.
_SECCOMP = {
    "x86_64": (
        0xC000003E,
        [41, 101, 310, 311, 165, 166, 155, 321, 298, 323, 248, 249, 250, 272, 308, 246, 320, 175,
         313, 176, 304, 169],
        [56, 59, 322, 62, 200, 234, 129, 297, 109, 112, 57, 58, 76, 82, 264, 316, 83, 258, 84, 85,
         86, 265, 87, 263, 88, 266, 133, 259],
        56,
        {2: 24, 257: 32},
    ),
    "aarch64": (
        0xC00000B7,
        [198, 117, 270, 271, 40, 39, 41, 280, 241, 282, 217, 218, 219, 97, 268, 104, 294, 105,
         273, 106, 265, 142],
        [220, 221, 281, 129, 130, 131, 138, 240, 154, 157, 45, 38, 276, 34, 37, 35, 36, 33],
        220,
        {56: 32},
    ),
}  # fmt: skip
_EVERYWHERE, _CANDIDATE_EVERYWHERE, _CLONE3 = [425, 428, 429, 430, 438, 442], [424, 434, 437], 435
_NEW_NAMESPACES = 0x7E020080  # the flags of clone that make a namespace
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_EPERM, _ENOSYS = 1, 38


def deny_calls(*, candidate: bool) -> None:
    """Refuse system calls, for good, to this process and what it starts.

    Raises:
        OSError: the kernel has no seccomp, or the machine is of no known architecture.
    """
    if (known := _SECCOMP.get(os.uname().machine)) is None:
        raise OSError(_ENOSYS, f"no system call numbers for {os.uname().machine}")
    architecture, denied, more, clone, opens = known
    denied = denied + _EVERYWHERE + (more + _CANDIDATE_EVERYWHERE if candidate else [])
    load, equal, any_of, at_least, ret = 0x20, 0x15, 0x45, 0x35, 0x06
    kill, allow, refuse = 0x80000000, 0x7FFF0000, 0x00050000
    code = [
        (load, 0, 0, 4), (equal, 1, 0, architecture), (ret, 0, 0, kill),
        (load, 0, 0, 0), (at_least, 0, 1, 0x40000000), (ret, 0, 0, refuse | _EPERM),  # x32
        # Its flags are behind a pointer; the C library goes back to clone.
        (equal, 0, 1, _CLONE3), (ret, 0, 0, refuse | _ENOSYS),
    ]  # fmt: skip
    for number in denied:
        code += [(equal, 0, 1, number), (ret, 0, 0, refuse | _EPERM)]
    flags = [(clone, 16, _NEW_NAMESPACES)]
    flags += [(number, offset, _WRITING) for number, offset in opens.items() if candidate]
    for number, offset, some in flags:
        code += [(equal, 0, 4, number), (load, 0, 0, offset), (any_of, 0, 1, some)]
        code += [(ret, 0, 0, refuse | _EPERM), (ret, 0, 0, allow)]
    code += [(ret, 0, 0, allow)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in code))
    header = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(code), ctypes.addressof(program))
    )
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    if _libc.prctl(22, ctypes.c_ulong(2), header, 0, 0):  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
        raise OSError(ctypes.get_errno(), "seccomp is not available")


_READ, _ALL_OF_A_FILE = 0b1101, 0b1100_0000_0000_0111


def restrict_files(rules: dict[str, list[str]]) -> None:
    """Landlock: from here on only what `rules` names may be used, and no TCP.

    Args:
        rules: Paths, with all below them, to `read` (and list and execute), and to `write` (that
            is, to do anything). A path that does not exist is skipped.

    Raises:
        OSError: the kernel has no Landlock.
    """
    abi = _libc.syscall(444, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    if abi < 1:
        raise OSError(ctypes.get_errno(), "Landlock is not available")
    # What newer kernels can restrict: 2 renames across folders, 3 truncation, 4 TCP, 5 ioctl on
    # devices, 6 signals and abstract sockets out of the sandbox.
    handled = (1 << (16 if abi >= 5 else min(12 + abi, 15))) - 1
    wanted = struct.pack("QQQ", handled, 3 * (abi >= 4), 3 * (abi >= 6))
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = _libc.syscall(444, wanted, ctypes.c_size_t(size), ctypes.c_uint32(0))
    if ruleset < 0:
        raise OSError(ctypes.get_errno(), "Landlock took no rules")
    for kind, rights in (("read", _READ), ("write", handled)):
        for path in rules.get(kind, []):
            try:
                fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                continue
            allowed = rights & handled & (-1 if os.path.isdir(path) else _ALL_OF_A_FILE)
            rule = struct.pack("=Qi", allowed, fd)
            failed = _libc.syscall(445, ruleset, 1, rule, ctypes.c_uint32(0))
            os.close(fd)
            if failed:
                raise OSError(ctypes.get_errno(), f"Landlock took no rule for {path}")
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    if _libc.syscall(446, ruleset, ctypes.c_uint32(0)):
        raise OSError(ctypes.get_errno(), "Landlock could not be entered")
    os.close(ruleset)


def mapped_bytes() -> int:
    """How much address space this process has mapped; also in tier landlock, where /proc is out of
    sight: what was opened before can be read."""
    if _STATM not in os.environ:
        os.environ[_STATM] = str(os.open("/proc/self/statm", os.O_RDONLY))
    return int(os.pread(int(os.environ[_STATM]), 99, 0).split()[0]) * resource.getpagesize()


def lock_down(address_space_bytes: int) -> None:
    """What a candidate's own Python runs under, in every tier, as far as the kernel can: no new
    process, no signal, no socket, no file opened for writing, no look at other processes, and no
    more than `address_space_bytes` in all."""
    _limit({"address_space_bytes": address_space_bytes, "file_bytes": 0, "processes": 0})
    _keep_capabilities(0)
    try:  # of /proc only what is its own
        read = [f"/{name}" for name in os.listdir("/") if name != "proc"] + ["/proc/self"]
    except PermissionError:  # tier landlock, which shows nothing of /proc
        read = ["/"]
    for restrict in (lambda: restrict_files({"read": read}), lambda: deny_calls(candidate=True)):
        try:
            restrict()
        except OSError:  # the tier's record says what this kernel lacks
            continue


def main() -> None:
    role, *options = sys.argv[1 : sys.argv.index("--")]
    command = sys.argv[sys.argv.index("--") + 1 :]
    named: dict[str, list[str]] = {}
    for option in options:
        name, _, value = option.partition("=")
        named.setdefault(name, []).append(value)
    if role == "supervise":
        (lifeline,) = map(int, named.pop("lifeline"))
        sys.exit(_supervise(lifeline, {name: int(v) for name, (v,) in named.items()}, command))
    os.environ["HOME"] = private = os.environ["TMPDIR"]
    # Files of other users stay root's to use where the rules allow it. Above all CAP_PERFMON goes:
    # with it, from Linux 6.17 on, one reads the judge's environment past Landlock (measured).
    _keep_capabilities(_FILE_CAPABILITIES)
    mapped_bytes()
    os.set_inheritable(int(os.environ[_STATM]), True)
    if named:
        restrict_files({**named, "write": [*named["write"], private]})
    deny_calls(candidate=False)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()

"""Hostile programs, each run inside a sandbox. They print what they have found; who judges is outside.

`@secret@` and the like are the places of canaries: a program knows where to look, so that only the sandbox stops it.
"""

from __future__ import annotations

# Everything that /proc shows of any process, and what the program itself has open.
PROC = r"""
import os
for pid in sorted(filter(str.isdigit, os.listdir("/proc")), key=int):
    for name in ("environ", "cmdline", "maps", "mountinfo"):
        try:
            print(pid, name, open(f"/proc/{pid}/{name}", "rb").read()[:20000])
        except OSError as error:
            pass
    for name in ("root", "cwd", "exe"):
        try:
            print(pid, name, os.listdir(f"/proc/{pid}/{name}@canary_folder@"))
        except OSError:
            pass
    try:
        with open(f"/proc/{pid}/mem", "rb") as memory:
            for line in open(f"/proc/{pid}/maps"):
                start, end = (int(word, 16) for word in line.split()[0].split("-"))
                if "[stack]" in line or "[heap]" in line:
                    memory.seek(start)
                    print(memory.read(min(end - start, 1 << 20)))
    except OSError:
        pass
print("FDS", sorted(int(fd) for fd in os.listdir("/proc/self/fd"))[:-1], os.environ)
"""

# Every way to another place: the canaries listen for all of them.
NETWORK = r"""
import socket, itertools
def attempt(what, action):
    try:
        print("REACHED", what, action())
    except OSError as error:
        print(what, error)
def tcp(host, port, family):
    def go():
        with socket.socket(family, socket.SOCK_STREAM) as one:
            one.settimeout(1)
            one.connect((host, port))
            one.sendall(b"out")
    return go
for host, family in (("127.0.0.1", 2), ("::1", 10), ("@host@", 2), ("169.254.169.254", 2), ("fd00:ec2::254", 10)):
    for port in (@port@, 80, 53):
        if (host, port) != ("127.0.0.1", 80):
            attempt(f"tcp {host} {port}", tcp(host, port, family))
def udp():
    with socket.socket(2, socket.SOCK_DGRAM) as one:
        return one.sendto(b"out", ("@host@", @port@))
attempt("udp", udp)
for address in ("@unix@", "\0@abstract@"):
    def unix():
        with socket.socket(1, socket.SOCK_STREAM) as one:
            one.connect(address)
            one.sendall(b"out")
    attempt("unix", unix)
attempt("dns", lambda: socket.getaddrinfo("example.com", 80))
for family in range(64):
    if family in (1, 2, 10):
        continue
    for kind in (1, 2, 3):
        try:
            socket.socket(family, kind, 0).close()
            print("FAMILY", family)
        except OSError:
            pass
for kind in (socket.SOCK_RAW,):
    attempt("raw", lambda: socket.socket(2, kind, 1))
with open("/proc/net/dev") as file:
    print("DEVICES", [line.split(":")[0].strip() for line in file][2:])
"""

# Calls that must not work, by their numbers on x86-64 and on aarch64.
CALLS = r"""
import ctypes, os, platform
libc = ctypes.CDLL(None, use_errno=True)
x86 = platform.machine() == "x86_64"
calls = dict(
    unshare=(272, 97), setns=(308, 268), mount=(165, 40), umount2=(166, 39), pivot_root=(155, 41),
    ptrace=(101, 117), bpf=(321, 280), io_uring_setup=(425, 425), userfaultfd=(323, 282),
    keyctl=(250, 219), add_key=(248, 217), perf_event_open=(298, 241), kexec_load=(246, 104),
    init_module=(175, 105), open_by_handle_at=(304, 265), process_vm_readv=(310, 270),
    fsopen=(430, 430), open_tree=(428, 428), move_mount=(429, 429), pidfd_getfd=(438, 438),
    chroot=(161, 51), swapon=(167, 224), reboot=(169, 142), sethostname=(170, 161),
    clone3=(435, 435), personality=(135, 92), memfd_create=(319, 279),
)
for name, numbers in calls.items():
    number = numbers[0] if x86 else numbers[1]
    first = 0x10000000 if name == "unshare" else 0
    ctypes.set_errno(0)
    result = libc.syscall(number, first, 0, 0, 0, 0)
    error = ctypes.get_errno()
    if result != -1 or error not in (1, 38):
        print("CALL", name, result, error)
import fcntl
try:
    print("CALL typed", fcntl.ioctl(0, 0x5412, b"x"))
except OSError:
    pass
for name in ("CapEff", "CapPrm", "CapBnd", "NoNewPrivs", "Seccomp", "CapInh", "CapAmb"):
    for line in open("/proc/self/status"):
        if line.startswith(name + ":"):
            print("STATUS", line.split()[0], line.split()[1])
"""

# A call by the numbers of i386: the filter must not mistake it, and kills.
I386 = r"""
import ctypes, mmap
code = bytes.fromhex("b814000000cd80c3")   # mov eax, 20 (getpid); int 0x80; ret
page = mmap.mmap(-1, 4096, prot=7)
page.write(code)
call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
print("I386", call())
"""
X32 = r"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
print("X32", libc.syscall(0x40000000 + 39), ctypes.get_errno())
"""

# Files of the host, read or written by every path that there is.
FILES = r"""
import os, itertools
def attempt(what, action):
    try:
        print(what, action())
    except (OSError, ValueError) as error:
        pass
for path in ("@secret@", "/proc/1/root@secret@", "/proc/self/root@secret@", "/proc/self/cwd/../../../../@secret@",
             "/etc/shadow", "/root", "/sys/kernel", "/proc/kcore", "/dev/mem", "/dev/kmsg", "/var"):
    attempt("READ " + path, lambda: open(path, "rb").read(200) if not os.path.isdir(path) else os.listdir(path))
for path in ("/usr/x", "/etc/x", "/x", "/proc/sys/kernel/hostname", "/proc/sysrq-trigger", "/dev/x", "/run/x",
             "/usr/bin/x", "/proc/sys/kernel/core_pattern", "/bin/x"):
    attempt("WROTE " + path, lambda: open(path, "w").write("x"))
attempt("MKNOD", lambda: os.mknod("/mnt/data/disk", 0o60600, os.makedev(8, 0)))
attempt("SETUID", lambda: os.setuid(0))
attempt("CHOWN", lambda: os.chown("/mnt/data", 0, 0))
attempt("NICE", lambda: os.nice(-5))
# Every mount, and every folder of the first levels: what can be written, is.
places = {line.split()[4] for line in open("/proc/self/mountinfo")}
for level in range(3):
    for base in list(places):
        attempt("", lambda: places.update(os.path.join(base, one) for one in os.listdir(base)
                if base.count("/") < 3 and not base.startswith("/proc") and os.path.isdir(os.path.join(base, one))))
allowed = ("/mnt/data", "/tmp", "/home/user", "/dev/shm", "/proc/")
for place in sorted(places):
    if not place.startswith(allowed):
        attempt("WROTE " + place, lambda: open(os.path.join(place, "escaped"), "w").write("x"))
"""

# The supervisor: signals, its descriptors, its memory, and what waits for the next command.
SUPERVISOR = r"""
import os, signal
for number in range(1, 65):
    if number not in (signal.SIGCHLD,):
        try:
            os.kill(1, number)
        except OSError:
            pass
for fd in range(64):
    for flags in (os.O_RDWR, os.O_WRONLY):
        try:
            opened = os.open(f"/proc/1/fd/{fd}", flags | os.O_NONBLOCK)
            os.write(opened, b"\xff" * 4096)
        except OSError:
            pass
for name, text in ((".bashrc", "echo PLANTED"), (".profile", "echo PLANTED"), ("sitecustomize.py", "print('PLANTED')"),
                   ("sh", "#!/bin/sh\necho PLANTED")):
    for folder in ("/mnt/data", "/home/user"):
        try:
            open(os.path.join(folder, name), "w").write(text)
            os.chmod(os.path.join(folder, name), 0o755)
        except OSError:
            pass
print("done")
"""

# --- bombs: bounded ones, in a sandbox with small limits ----------------------------------------------

FORK = r"""
import os, time
made = 0
try:
    while made < 2000:
        if os.fork() == 0:
            time.sleep(30)
            os._exit(0)
        made += 1
except OSError as error:
    print("stopped", made, error)
print("MADE", made)
os.kill(0, 9)
"""
THREADS = r"""
import threading, time
made = 0
try:
    while made < 2000:
        threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
        made += 1
except RuntimeError as error:
    print("stopped", made, error)
print("MADE", made, flush=True)
import os
os._exit(0)
"""
MEMORY = r"""
held = []
for number in range(600):
    held.append(bytearray(1 << 20))
print("HELD", len(held))
"""
CHILDREN_MEMORY = r"""
import os, time
for number in range(12):
    if os.fork() == 0:
        held = bytearray(b"x") * (40 << 20)
        time.sleep(2)
        os._exit(0)
time.sleep(2)

"""
SHARED_MEMORY = r"""
import os
written = 0
for folder in ("/dev/shm", "/tmp", "/home/user"):
    try:
        with open(os.path.join(folder, "big"), "wb") as file:
            for number in range(600):
                written += file.write(bytes(1 << 20))
    except OSError as error:
        print(folder, error)
print("HELD", written >> 20)
"""
PIPES = r"""
import os, socket
held, size = [], 0
try:
    while size < (600 << 20):
        a, b = socket.socketpair()
        a.setblocking(False)
        held += [a, b]
        try:
            while True:
                size += a.send(bytes(1 << 16))
        except BlockingIOError:
            pass
except OSError as error:
    print(error)
print("HELD", size >> 20)
"""
DISK = r"""
import os, time
written = 0
for number in range(100):
    with open(f"/mnt/data/{number}", "wb") as file:
        for _ in range(8):
            written += file.write(os.urandom(1 << 20))
            time.sleep(0.01)
print("HELD", written >> 20)
"""
BIG_FILE = r"""
try:
    with open("/mnt/data/big", "wb") as file:
        for _ in range(600):
            file.write(bytes(1 << 20))
            file.flush()
    print("HELD 600")
except OSError as error:
    print("stopped", error)
"""
INODES = r"""
import os, time
for number in range(20000):
    open(f"/mnt/data/{number}", "w").close()
    if number % 500 == 0:
        time.sleep(0.05)
print("HELD 20000")
"""
DEEP = r"""
import os
os.chdir("/mnt/data")
for number in range(2000):
    os.mkdir("d" * 200)
    os.chdir("d" * 200)
open(b"\xff\xfe" + b"n" * 250, "w").close()
print("made")
"""

# Hears no signal that can be ignored; without quotes, for a command line.
DEAF = """import signal,time
for n in range(1,32):
  signal.signal(n, signal.SIG_IGN) if n not in (9, 19) else None
time.sleep(60)"""

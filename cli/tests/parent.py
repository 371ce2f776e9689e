"""A parent with forked workers: Python's multiprocessing walks state that the parent built.

usage: parent.py HOW WHERE

HOW says who registers four bytes that a device would use:
  madvise   nobody; the page is marked as a registration would mark it
  verbs     this program, with the verbs library in VERBS
  plugin    the network plugin in PLUGIN, for NCCL, at both ends of a connection to itself
WHERE says where the four bytes are:
  heap      in the middle of the parent's state
  own       on a page of their own, which is the cure

Prints one JSON line when the worker has ended, waits for a line, ends what it began, prints another, and waits again.
"""

import ctypes
import json
import mmap
import multiprocessing
import os
import sys

MADV_DONTFORK = 10
LOCAL_WRITE = 1
HOST_MEMORY = 1

# What the parent built: many small objects, a word each, as an allocator packs them.
state = [ctypes.c_int(number) for number in range(20_000)]
EXPECTED = sum(range(20_000))


def walk():
    """The worker."""
    os._exit(0 if sum(word.value for word in state) == EXPECTED else 1)


def worker():
    """How a worker ended that was forked now; negative: by a signal."""
    process = multiprocessing.get_context("fork").Process(target=walk)
    process.start()
    process.join()
    return process.exitcode


class Marked:
    """What a registration does to the page, without one."""

    def __init__(self, address):
        self.page = address - address % mmap.PAGESIZE
        self.advise(MADV_DONTFORK)

    def advise(self, advice):
        if ctypes.CDLL(None).madvise(ctypes.c_void_p(self.page), ctypes.c_size_t(mmap.PAGESIZE), advice) != 0:
            sys.exit("madvise failed")

    def close(self):
        self.advise(MADV_DONTFORK + 1)


class Verbs:
    """A registration by the program itself."""

    def __init__(self, address):
        self.library = ctypes.CDLL(os.environ["VERBS"])
        for name in ("ibv_get_device_list", "ibv_open_device", "ibv_alloc_pd", "ibv_reg_mr"):
            getattr(self.library, name).restype = ctypes.c_void_p
        if self.library.ibv_fork_init() != 0:
            sys.exit("ibv_fork_init failed")
        count = ctypes.c_int()
        devices = self.library.ibv_get_device_list(ctypes.byref(count))
        first = ctypes.cast(devices, ctypes.POINTER(ctypes.c_void_p))[0]
        self.context = self.library.ibv_open_device(ctypes.c_void_p(first))
        self.domain = self.library.ibv_alloc_pd(ctypes.c_void_p(self.context))
        self.region = self.library.ibv_reg_mr(
            ctypes.c_void_p(self.domain), ctypes.c_void_p(address), ctypes.c_size_t(4), LOCAL_WRITE
        )
        self.library.ibv_free_device_list(ctypes.c_void_p(devices))
        if not self.region:
            sys.exit("ibv_reg_mr failed")

    def close(self):
        self.library.ibv_dereg_mr(ctypes.c_void_p(self.region))
        self.library.ibv_dealloc_pd(ctypes.c_void_p(self.domain))
        self.library.ibv_close_device(ctypes.c_void_p(self.context))


class Plugin:
    """A registration by the plugin, as NCCL asks for one."""

    # The calls of table version 9 in their order, behind the name.
    CALLS = (
        "init devices getProperties listen connect accept regMr regMrDmaBuf deregMr isend irecv iflush test closeSend "
        "closeRecv closeListen getDeviceMr irecvConsumed makeVDevice"
    ).split()

    def __init__(self, address):
        library = ctypes.CDLL(os.environ["PLUGIN"])
        self.table = (ctypes.c_void_p * (1 + len(self.CALLS))).in_dll(library, "ncclNetPlugin_v9")
        self.call("init", None)
        handle = ctypes.create_string_buffer(128)
        self.listener, self.sender, self.receiver, self.region = (ctypes.c_void_p() for _ in range(4))
        self.call("listen", ctypes.c_int(0), handle, ctypes.byref(self.listener))
        while not (self.sender and self.receiver):
            if not self.sender:
                self.call("connect", ctypes.c_int(0), handle, ctypes.byref(self.sender), None)
            if not self.receiver:
                self.call("accept", self.listener, ctypes.byref(self.receiver), None)
        self.call(
            "regMr",
            self.receiver,
            ctypes.c_void_p(address),
            ctypes.c_size_t(4),
            ctypes.c_int(HOST_MEMORY),
            ctypes.byref(self.region),
        )

    def call(self, name, *arguments):
        function = ctypes.CFUNCTYPE(ctypes.c_int)(self.table[1 + self.CALLS.index(name)])
        result = function(*arguments)
        if result != 0:
            sys.exit(f"{name}: {result}")

    def close(self):
        self.call("deregMr", self.receiver, self.region)
        self.call("closeSend", self.sender)
        self.call("closeRecv", self.receiver)
        self.call("closeListen", self.listener)


def main():
    how, where = sys.argv[1:]
    page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    word = {"heap": state[len(state) // 2], "own": ctypes.c_int.from_buffer(page)}[where]
    address = ctypes.addressof(word)
    before = worker()
    registration = {"madvise": Marked, "verbs": Verbs, "plugin": Plugin}[how](address)
    during = worker()
    print(json.dumps({"address": hex(address), "before": before, "during": during}), flush=True)
    sys.stdin.readline()
    registration.close()
    print(json.dumps({"after": worker()}), flush=True)
    sys.stdin.readline()


main()

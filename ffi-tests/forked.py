"""A data loader of a job: a Python process drives the plugin, and children that multiprocessing forks walk what it built.

    forked.py PLUGIN VERBS_LIBRARY

Registered pages are taken from children as the environment says (SOFTRNIC_FORK). Exits with 0 if every child saw all of it.
"""

import ctypes
import gc
import multiprocessing
import os
import sys
import time

WORDS, ROWS, WORKERS, SIZE, HANDLE = 20000, 300, 4, 3000, 128
DEADLINE = 60

# The slots of ncclNet_v12_t that are used, in words behind the name.
SLOTS = dict(init=1, devices=2, listen=4, connect=5, accept=6, reg=7, dereg=9, isend=10, irecv=11, test=13, close_send=14,
             close_recv=15, close_listen=16, finalize=20)
POINTER = ctypes.POINTER(ctypes.c_void_p)


class Net:
    """The plugin's newest table."""

    def __init__(self, path):
        library = ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_LOCAL)
        self.table = (ctypes.c_void_p * 22).in_dll(library, "ncclNetPlugin_v12")

    def call(self, name, *arguments):
        """Calls a function that must succeed."""
        function = ctypes.CFUNCTYPE(ctypes.c_int)(self.table[SLOTS[name]])
        result = function(*arguments)
        if result != 0:
            sys.exit(f"{name} returned {result}")

    def until(self, out, name, *arguments):
        """Calls a function again and again until it gives something out."""
        end = time.monotonic() + DEADLINE
        while not out.value:
            self.call(name, *arguments)
            if time.monotonic() > end:
                sys.exit(f"waited too long for {name}")
        return out

    def finish(self, request):
        done, sizes = ctypes.c_int(), (ctypes.c_int * 8)()
        self.until(done, "test", request, ctypes.byref(done), sizes)
        return sizes[0]


def pair(net, context):
    """A connection of this process with itself."""
    handle = ctypes.create_string_buffer(HANDLE)
    listener, send, recv = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    net.call("listen", context, 0, handle, ctypes.byref(listener))
    end = time.monotonic() + DEADLINE
    while not (send.value and recv.value):
        if not send.value:
            net.call("connect", context, 0, handle, ctypes.byref(send), None)
        if not recv.value:
            net.call("accept", listener, ctypes.byref(recv), None)
        if time.monotonic() > end:
            sys.exit("no connection")
    net.call("close_listen", listener)
    return send, recv


def message(net, send, recv, data):
    """Moves bytes between two buffers of Python's heap, which share their pages with its objects."""
    source, target = ctypes.create_string_buffer(data, SIZE), ctypes.create_string_buffer(SIZE)
    size, tag = ctypes.c_size_t(SIZE), ctypes.c_int(3)
    regions, requests = [ctypes.c_void_p(), ctypes.c_void_p()], [ctypes.c_void_p(), ctypes.c_void_p()]
    net.call("reg", send, source, size, 1, ctypes.byref(regions[0]))
    net.call("reg", recv, target, size, 1, ctypes.byref(regions[1]))
    address = ctypes.c_void_p(ctypes.addressof(target))
    net.until(requests[1], "irecv", recv, 1, ctypes.byref(address), ctypes.byref(size), ctypes.byref(tag),
              ctypes.byref(regions[1]), None, ctypes.byref(requests[1]))
    net.until(requests[0], "isend", send, source, size, tag, regions[0], None, ctypes.byref(requests[0]))
    sizes = [net.finish(request) for request in requests]
    if sizes[1] != SIZE or target.raw != source.raw:
        sys.exit(f"the message did not arrive: {sizes}")
    return source, target, regions


STATE = {}


def build():
    """State of a parent: many small objects, so that they lie on every page of the heap."""
    for number in range(WORDS):
        STATE[f"key {number}"] = {"number": number, "text": "x" * (number % 97), "list": list(range(number % 13))}


def walk():
    """What a child does: it reads everything, and makes objects of its own."""
    total, kept = 0, []
    for row in range(ROWS):
        kept.append([row] * 10)
    for key, value in STATE.items():
        if key != f"key {value['number']}" or len(value["text"]) != value["number"] % 97:
            sys.exit(f"{key} is {value}")
        total += value["number"] + sum(value["list"]) - sum(range(value["number"] % 13))
    gc.collect()  # touches the head of every object
    return total


def work(expected):
    total = walk()
    if total != expected:
        sys.exit(f"a child saw {total}, not {expected}")


def main():
    plugin, verbs = sys.argv[1:]
    os.environ["NCCL_IBVERBS_LIB"] = verbs
    multiprocessing.set_start_method("fork")
    net, context = Net(plugin), ctypes.c_void_p()
    net.call("init", ctypes.byref(context), ctypes.c_uint64(5), None, None, None)
    build()
    send, recv = pair(net, context)
    build()  # what was free beside the plugin's objects is used
    held = [message(net, send, recv, bytes([number]) * SIZE) for number in range(20)]
    expected = sum(range(WORDS))
    for _ in range(3):
        children = [multiprocessing.Process(target=work, args=(expected,)) for _ in range(WORKERS)]
        for child in children:
            child.start()
        for child in children:
            child.join(DEADLINE)
        ends = [child.exitcode for child in children]
        if ends != [0] * WORKERS:
            sys.exit(f"children ended with {ends}")
    held.append(message(net, send, recv, b"!" * SIZE))  # the parent goes on
    marked = sum(" dc" in line for line in open("/proc/self/smaps") if line.startswith("VmFlags:"))
    for _, _, regions in held:
        net.call("dereg", send, regions[0])
        net.call("dereg", recv, regions[1])
    net.call("close_send", send)
    net.call("close_recv", recv)
    net.call("finalize", context)
    left = sum(" dc" in line for line in open("/proc/self/smaps") if line.startswith("VmFlags:"))
    print(f"marked {marked} left {left}")


if __name__ == "__main__":
    main()

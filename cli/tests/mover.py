"""A program with connections of the network plugin in PLUGIN to itself, which does what each line of its input says.

  open                  another connection
  move COUNT SIZE       so many messages over the last connection, one after the other
  group COUNT SIZE      one receive of so many members, and its messages
  flush COUNT           so many flushes
  post                  a receive that nothing is sent to
  vain                  a send that no receive was posted for
  fail                  closes the receiving end and sends all the same
  close                 all connections
  churn COUNT           opens and closes a connection so many times
  fork                  a child that does nothing until its parent ends

Answers each with one JSON line. Ends with its input.
"""

import ctypes
import json
import os
import sys

ROOM = 1 << 20
CALLS = (
    "init devices getProperties listen connect accept regMr regMrDmaBuf deregMr isend irecv iflush test closeSend "
    "closeRecv closeListen getDeviceMr irecvConsumed makeVDevice"
).split()
library = ctypes.CDLL(os.environ["PLUGIN"])
table = (ctypes.c_void_p * (1 + len(CALLS))).in_dll(library, "ncclNetPlugin_v9")
functions = {
    name: ctypes.CFUNCTYPE(ctypes.c_int)(address) for name, address in zip(CALLS, table[1:]) if address is not None
}
buffer = ctypes.create_string_buffer(ROOM)


def call(name, *arguments):
    result = functions[name](*arguments)
    if result != 0:
        sys.exit(f"{name}: {result}")


class Connection:
    def __init__(self):
        handle = ctypes.create_string_buffer(128)
        self.listener, self.sender, self.receiver = (ctypes.c_void_p() for _ in range(3))
        call("listen", ctypes.c_int(0), handle, ctypes.byref(self.listener))
        while not (self.sender and self.receiver):
            if not self.sender:
                call("connect", ctypes.c_int(0), handle, ctypes.byref(self.sender), None)
            if not self.receiver:
                call("accept", self.listener, ctypes.byref(self.receiver), None)
        self.handles = []
        for comm in (self.sender, self.receiver):
            region = ctypes.c_void_p()
            call("regMr", comm, buffer, ctypes.c_size_t(ROOM), ctypes.c_int(1), ctypes.byref(region))
            self.handles.append((comm, region))

    def irecv(self, members, size):
        sizes = (ctypes.c_size_t * members)(*[size] * members)
        data = (ctypes.c_void_p * members)(*[ctypes.addressof(buffer)] * members)
        tags = (ctypes.c_int * members)(*range(members))
        regions = (ctypes.c_void_p * members)(*[self.handles[1][1].value] * members)
        request = ctypes.c_void_p()
        while not request:
            call("irecv", self.receiver, ctypes.c_int(members), data, sizes, tags, regions, ctypes.byref(request))
        return request

    def try_isend(self, tag, size):
        request = ctypes.c_void_p()
        result = functions["isend"](
            self.sender, buffer, ctypes.c_size_t(size), ctypes.c_int(tag), self.handles[0][1], ctypes.byref(request)
        )
        return result, request

    def isend(self, tag, size):
        while True:
            result, request = self.try_isend(tag, size)
            if result != 0:
                sys.exit(f"isend: {result}")
            if request:
                return request

    def move(self, members, size):
        requests = [self.irecv(members, size)]
        requests += [self.isend(tag, size) for tag in range(members)]
        for request in requests:
            wait(request)

    def flush(self):
        size = (ctypes.c_int * 1)(8)
        data = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
        regions = (ctypes.c_void_p * 1)(self.handles[1][1].value)
        request = ctypes.c_void_p()
        call("iflush", self.receiver, ctypes.c_int(1), data, size, regions, ctypes.byref(request))
        if request:
            wait(request)

    def close(self):
        for comm, region in self.handles:
            call("deregMr", comm, region)
        call("closeSend", self.sender)
        if self.receiver:
            call("closeRecv", self.receiver)
        call("closeListen", self.listener)


def wait(request):
    done, sizes = ctypes.c_int(0), (ctypes.c_int * 8)()
    while not done.value:
        call("test", request, ctypes.byref(done), sizes)


def main():
    call("init", None)
    connections = []
    for line in sys.stdin:
        word, *numbers = line.split()
        numbers = [int(number) for number in numbers]
        answer = {}
        if word == "open":
            connections.append(Connection())
        elif word == "move":
            for _ in range(numbers[0]):
                connections[-1].move(1, numbers[1])
        elif word == "group":
            connections[-1].move(*numbers)
        elif word == "flush":
            for _ in range(numbers[0]):
                connections[-1].flush()
        elif word == "post":
            connections[-1].irecv(1, 64)
        elif word == "vain":
            answer["taken"] = bool(connections[-1].try_isend(0, 64)[1])
        elif word == "fail":
            last = connections[-1]
            call("deregMr", *last.handles.pop())
            call("closeRecv", last.receiver)
            last.receiver = None
            result = 0
            while result == 0:
                result, _ = last.try_isend(0, 64)
            answer["result"] = result
        elif word == "close":
            while connections:
                connections.pop().close()
        elif word == "churn":
            for _ in range(numbers[0]):
                Connection().close()
        elif word == "fork":
            # The input is the parent's: the child waits for the parent's end of a pipe to go with it.
            reading, writing = os.pipe()
            child = os.fork()
            if child == 0:
                os.close(writing)
                os.read(reading, 1)
                os._exit(0)
            answer["pid"] = child
        print(json.dumps({"did": word, **answer}), flush=True)


main()

"""What an AI platform does to move the traffic of a job: two calls of ClusterD's gRPC service Recover.

    python switch_nic.py 127.0.0.1:8899 JOB_UID node-0 '["0", "1"]' '[true, true]'

It has nothing of ours but the messages; those made from any other copy of recover.proto will do.
"""

import json
import os
import sys

import grpc

from evertrain.wire import recover_pb2


def main() -> int:
    address, job, node, dev, op = sys.argv[1:]
    metadata = [("x-job-token", os.environ.get("EVERTRAIN_TOKEN", ""))]  # not with `evertrain up --clusterd-insecure`
    with grpc.insecure_channel(address) as channel:
        switch = channel.unary_unary(
            "/Recover/SwitchNicTrack",
            request_serializer=recover_pb2.SwitchNics.SerializeToString,
            response_deserializer=recover_pb2.Status.FromString,
        )
        results = channel.unary_stream(
            "/Recover/SubscribeSwitchNicSignal",
            request_serializer=recover_pb2.SwitchNicRequest.SerializeToString,
            response_deserializer=recover_pb2.SwitchNicResponse.FromString,
        )
        devices = recover_pb2.DeviceList(dev=json.loads(dev), op=json.loads(op))
        status = switch(recover_pb2.SwitchNics(jobID=job, nicOps={node: devices}), metadata=metadata)
        print(status.code, status.info)
        if status.code != 0:
            return 1
        for result in results(recover_pb2.SwitchNicRequest(jobID=job), metadata=metadata):
            print(result.msg)
            return 0 if result.msg == "switch nic finish" else 1
    return 1


if __name__ == "__main__":
    sys.exit(main())

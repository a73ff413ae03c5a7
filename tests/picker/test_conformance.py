"""The checks of any picker: ours passes, and pickers with a fault are found out."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from certificates import Authority
from picker.pickers import is_idle, picking
from router.conftest import run
from tailrace.picker import conformance
from tailrace.picker.conformance import CHECKS, FAILED, PASSED, check_picker
from tailrace.picker.messages import SERVICE

ENDPOINT = "127.0.0.1:8000"


def test_our_picker_passes() -> None:
    async def test() -> None:
        async with picking() as (picker, _, _e):
            address = f"127.0.0.1:{picker.listen_at[1]}"
            found = await check_picker(address, model="emulated", streams=100, limit_s=60)
            assert [(r.requirement, r.why) for r in found if r.outcome != PASSED] == []
            assert len(found) == len(CHECKS)
            for _ in range(200):
                if is_idle(picker):
                    return
                await asyncio.sleep(0.01)
            raise AssertionError("something is still in progress")

    run(test())


def test_pickers_with_tls_and_their_health_elsewhere(tmp_path: Path) -> None:
    """Certificates that pickers have signed themselves are for no name."""
    pair = Authority(tmp_path).sign("nobody", names="DNS:elsewhere.example")
    checks = (conformance.reports_health, conformance.keeps_the_body, conformance.survives_cancels)

    async def test() -> None:
        tls = {"certificate": pair.certificate, "key": pair.key}
        async with picking(tls=tls) as (picker, _, _e), picking() as (other, _, _f):
            address, health = (f"127.0.0.1:{each.listen_at[1]}" for each in (picker, other))
            for where in ("", health):
                found = await check_picker(
                    address, model="emulated", checks=checks, tls=True, health=where
                )
                assert [(r.requirement, r.why) for r in found if r.outcome != PASSED] == []
            plain = await check_picker(address, model="emulated", checks=checks[:1], limit_s=5)
            assert [r.outcome for r in plain] == [FAILED]
            nowhere = await check_picker(
                address, model="emulated", checks=checks[:1], tls=True, health="127.0.0.1:1"
            )
            assert [r.outcome for r in nowhere] == [FAILED]

    run(test(), factory=asyncio.new_event_loop)


async def faulty(request_iterator: Any, context: Any, fault: str) -> Any:
    """A picker with a fault, in a few lines."""
    body = b""
    async for request in request_iterator:
        kind = request.WhichOneof("request")
        reply = pb.ProcessingResponse()
        if kind == "request_body":
            body += request.request_body.body
            if not request.request_body.end_of_stream:
                continue
            common = reply.request_headers.response
            common.clear_route_cache = fault != "route"
            option = common.header_mutation.set_headers.add()
            option.header.key, option.header.raw_value = (
                "x-gateway-destination-endpoint", ENDPOINT.encode(),
            )  # fmt: skip
            fields = reply.dynamic_metadata.fields["envoy.lb"].struct_value.fields
            named = "10.0.0.9:1" if fault == "metadata" else ENDPOINT
            fields["x-gateway-destination-endpoint"].string_value = named
            yield reply
            size = 100_000 if fault == "parts" else 62_000
            for at in range(0, max(1, len(body)), size):
                part = pb.ProcessingResponse()
                streamed = part.request_body.response.body_mutation.streamed_response
                streamed.body = body[at : at + size]
                if fault == "body":
                    streamed.body = streamed.body.replace(b" ", b"")
                streamed.end_of_stream = at + size >= len(body)
                yield part
        elif kind not in ("request_headers",):
            getattr(reply, kind).SetInParent()
            yield reply


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        ("none", None),
        ("route", conformance.names_an_endpoint),
        ("metadata", conformance.names_an_endpoint),
        ("parts", conformance.keeps_the_body),
        ("body", conformance.keeps_the_body),
        ("subset", conformance.refuses_an_empty_subset),
        ("health", conformance.reports_health),
    ],
)
def test_faults_are_found(fault: str, check: Any) -> None:
    async def test() -> None:
        server = grpc.aio.server()

        async def process(request_iterator: Any, context: Any) -> Any:
            async for reply in faulty(request_iterator, context, fault):
                yield reply

        handler = grpc.stream_stream_rpc_method_handler(
            process,
            request_deserializer=pb.ProcessingRequest.FromString,
            response_serializer=pb.ProcessingResponse.SerializeToString,
        )
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {"Process": handler}),)
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            checks = (conformance.names_an_endpoint, conformance.keeps_the_body)
            if check is not None:
                checks = (check,)
            found = await check_picker(f"127.0.0.1:{port}", model="m", limit_s=10, checks=checks)
            assert {r.outcome for r in found} == {PASSED if check is None else FAILED}
        finally:
            await server.stop(0)

    run(test(), factory=asyncio.new_event_loop)

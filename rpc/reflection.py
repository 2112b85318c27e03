"""Server reflection: lists a server's services and describes their messages, for generic clients.

Newer clients ask `grpc.reflection.v1`, older ones `grpc.reflection.v1alpha`. Their messages are the
same bytes, so one servicer answers both. The package has the older description alone; that of the
newer one is made of it.
"""

from collections.abc import Sequence
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

__all__ = ["add_reflection"]

_OLD_PACKAGE = "grpc.reflection.v1alpha"
_NEW_PACKAGE = "grpc.reflection.v1"
_NEW_FILE = "grpc/reflection/v1/reflection.proto"
_NEW_SERVICE = f"{_NEW_PACKAGE}.ServerReflection"
_METHOD = "ServerReflectionInfo"


def add_reflection(server: grpc.aio.Server, service_names: Sequence[str]) -> None:
    """Makes a server answer questions of both versions.

    Args:
        server: the server, which is not listening yet.
        service_names: full names of the services to list, besides reflection itself.
    """
    _describe_new_version()
    names = (*service_names, reflection.SERVICE_NAME, _NEW_SERVICE)
    servicer: Any = reflection.aio.ReflectionServicer(names)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handler = grpc.method_handlers_generic_handler(_NEW_SERVICE, {_METHOD: method})
    server.add_generic_rpc_handlers((handler,))


def _describe_new_version() -> None:
    """Adds the newer description to the pool of descriptors, unless a package has done so."""
    pool = descriptor_pool.Default()
    try:
        pool.FindFileByName(_NEW_FILE)
    except KeyError:
        pool.AddSerializedFile(_new_description().SerializeToString())


def _new_description() -> descriptor_pb2.FileDescriptorProto:
    """The older description under the names of the newer version."""
    new = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(new)
    new.name, new.package = _NEW_FILE, _NEW_PACKAGE
    for message in new.message_type:
        for field in message.field:
            if field.type_name:
                field.type_name = _new_name(field.type_name)
    for service in new.service:
        for method in service.method:
            method.input_type = _new_name(method.input_type)
            method.output_type = _new_name(method.output_type)
    return new


def _new_name(type_name: str) -> str:
    return type_name.replace(f".{_OLD_PACKAGE}.", f".{_NEW_PACKAGE}.")

"""Streams for the servers that read lines and frames, with TLS or without."""

import asyncio
import ssl

STREAM_LIMIT = 1 << 20


async def stream(sock, context=None):
    """A reader and a writer of a connection that was accepted."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=STREAM_LIMIT)
    protocol = asyncio.StreamReaderProtocol(reader)
    # The transport closes what it is given; the listener closes the original.
    transport, _ = await loop.connect_accepted_socket(lambda: protocol, sock.dup(), ssl=context)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


def with_tls(certificate, protocols, serve):
    """A server of connections that speaks TLS, and notes which name was asked for, also if nothing comes of it."""

    async def secured(sock, contact):
        # One context for each connection: what it calls back does not know the connection.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        context.set_alpn_protocols(protocols)
        context.sni_callback = lambda _tls, name, _context: contact.note("tls", name=name)
        reader, writer = await stream(sock, context)
        await finished(serve(reader, writer, contact), writer)

    return secured


def without_tls(serve):
    """A server of connections that speaks no TLS."""

    async def clear(sock, contact):
        reader, writer = await stream(sock)
        await finished(serve(reader, writer, contact), writer)

    return clear


async def finished(served, writer):
    try:
        await served
        await writer.drain()
    finally:
        writer.close()

"""Our header coder beside the `hpack` package and the tables of RFC 7541."""

from __future__ import annotations

import hpack
import pytest
from hpack.hpack import decode_integer
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH
from hpack.table import HeaderTable
from hypothesis import given
from hypothesis import strategies as st

from proxy.hpack import CompressionError, Decoder, ListTooLargeError
from proxy.hpack_encoder import STABLE, VOLATILE, Encoder
from proxy.hpack_tables import CODES, STATIC, HuffmanError, huffman_decode, huffman_encode
from proxy.secret_fields import SECRET

NAMES = st.one_of(
    st.sampled_from(sorted({name for name, _ in STATIC} | SECRET | STABLE | VOLATILE)),
    st.binary(min_size=1, max_size=40),
)
VALUES = st.one_of(st.sampled_from([b"", b"1", b"gzip, deflate", b"x" * 200, b"/a/b?c=d"]), st.binary(max_size=80))
LISTS = st.lists(st.lists(st.tuples(NAMES, VALUES), max_size=12), min_size=1, max_size=12)


def decoded(decoder: hpack.Decoder, block: bytes) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in decoder.decode(block, raw=True)]


def resizes(block: bytes) -> int:
    """How many changes of the table's size a block begins with; a cut one counts."""
    at = count = 0
    while at < len(block) and block[at] & 0xE0 == 0x20:
        count += 1
        try:
            at += decode_integer(block[at:], 5)[1]
        except hpack.HPACKError:
            break
    return count


def test_tables_are_those_of_the_rfc() -> None:
    assert tuple(HeaderTable.STATIC_TABLE) == STATIC
    assert [int(code, 2) for code in CODES] == REQUEST_CODES
    assert [len(code) for code in CODES] == REQUEST_CODES_LENGTH


@given(st.binary(max_size=200))
def test_huffman_comes_back(text: bytes) -> None:
    assert huffman_decode(huffman_encode(text)) == text


@pytest.mark.parametrize(
    ("coded", "why"),
    [
        (b"\xff\xff\xff\xff", "EOS inside"),
        (huffman_encode(b"a") + b"\xff", "padding of eight bits or more"),
        (bytes([huffman_encode(b"a")[0] & 0xFE]), "padding with a 0"),
        (b"\xff", "nothing but eight bits of padding"),
    ],
)
def test_bad_huffman_is_refused(coded: bytes, why: str) -> None:
    with pytest.raises(HuffmanError):
        huffman_decode(coded)


@given(LISTS)
def test_their_decoder_reads_our_encoder(lists: list[list[tuple[bytes, bytes]]]) -> None:
    ours, theirs = Encoder(), hpack.Decoder()
    for fields in lists:
        assert decoded(theirs, ours.encode(fields)) == fields


@given(LISTS, st.booleans())
def test_our_decoder_reads_their_encoder(lists: list[list[tuple[bytes, bytes]]], huffman: bool) -> None:
    ours, theirs = Decoder(1 << 20), hpack.Encoder()
    for fields in lists:
        assert ours.decode(theirs.encode(fields, huffman=huffman)) == fields


@given(LISTS, st.lists(st.integers(0, 5000), min_size=1, max_size=12))
def test_tables_stay_equal_while_the_peer_moves_the_limit(
    lists: list[list[tuple[bytes, bytes]]], limits: list[int]
) -> None:
    ours, theirs = Encoder(), hpack.Decoder()
    for fields, limit in zip(lists, limits, strict=False):
        theirs.max_allowed_table_size = max(limit, 4096)
        ours.limit_table(limit)
        assert decoded(theirs, ours.encode(fields)) == fields
        assert theirs.header_table_size <= limit


def test_two_limits_between_blocks_are_both_said() -> None:
    # RFC 7541 4.2: the smallest evicted entries at our end, so the peer must hear of it.
    ours, theirs = Encoder(), Decoder(1 << 16)
    theirs.decode(ours.encode([(b"server", b"x")]))
    ours.limit_table(0)
    ours.limit_table(4096)
    block = ours.encode([(b"server", b"x")])
    assert block[:1] == b"\x20"
    assert theirs.decode(block) == [(b"server", b"x")]


def test_a_third_change_of_the_tables_size_is_refused() -> None:
    # Two say all there is to say (RFC 7541 4.2); 50 KB of them would cost 17 ms.
    decoder = Decoder(1 << 16)
    assert decoder.decode(b"\x20\x3f\xe1\x1f\x82") == [(b":method", b"GET")]
    with pytest.raises(CompressionError):
        decoder.decode(b"\x20\x3f\xe1\x1f\x20\x82")
    with pytest.raises(CompressionError):
        decoder.decode(b"\x20" * 50_000)


@given(
    st.lists(
        st.one_of(st.binary(max_size=60), st.sampled_from([b"\x20", b"\x20\x20", b"\x3f\x01\x20\x20"])), max_size=6
    )
)
def test_any_bytes_end_in_fields_or_in_our_errors_as_in_theirs(blocks: list[bytes]) -> None:
    ours, theirs = Decoder(1 << 16), hpack.Decoder(max_header_list_size=1 << 16)
    for block in blocks:
        if resizes(block) > 2:  # theirs takes any number
            with pytest.raises(CompressionError):
                ours.decode(block)
            return
        try:
            expected = decoded(theirs, block)
        except hpack.HPACKError:
            with pytest.raises((CompressionError, ListTooLargeError)):
                ours.decode(block)
            return
        assert ours.decode(block) == expected


@pytest.mark.parametrize(
    "block",
    [
        b"\x80",
        b"\xff\x80\x01",
        b"\x40",
        b"\x00\x05ab",
        b"\x82\x20",
        b"\x3f\xe2\x1f",
        b"\xff\xff\xff\xff\xff\xff\x01",
        b"\xbe",
    ],
)
def test_a_broken_block_is_a_compression_error(block: bytes) -> None:
    with pytest.raises(CompressionError):
        Decoder(1 << 16).decode(block)


@pytest.mark.parametrize("name", sorted(SECRET))
def test_a_secret_is_never_indexed_and_never_in_the_table(name: bytes) -> None:
    encoder, theirs = Encoder(), hpack.Decoder()
    for _ in range(3):
        (field,) = theirs.decode(encoder.encode([(name, b"sk-CANARY")]), raw=True)
        assert isinstance(field, hpack.NeverIndexedHeaderTuple)
    assert not theirs.header_table.dynamic_entries


@pytest.mark.parametrize("name", [b"x-request-id", b"date", b"content-length", b"cf-ray"])
def test_a_value_that_never_repeats_does_not_push_out_useful_ones(name: bytes) -> None:
    encoder, theirs = Encoder(), hpack.Decoder()
    for number in range(3):
        theirs.decode(encoder.encode([(name, b"%d" % number)]))
    assert not theirs.header_table.dynamic_entries


def test_an_unknown_name_is_indexed_when_its_value_comes_again() -> None:
    encoder, theirs = Encoder(), hpack.Decoder()
    sizes = []
    for _ in range(3):
        block = encoder.encode([(b"x-team", b"blue")])
        decoded(theirs, block)
        sizes.append(len(block))
    assert len(theirs.header_table.dynamic_entries) == 1
    assert sizes[2] == 1


def test_a_query_is_not_indexed_since_it_may_hold_a_key() -> None:
    encoder, theirs = Encoder(), hpack.Decoder()
    for _ in range(3):
        decoded(theirs, encoder.encode([(b":path", b"/v1?key=sk-CANARY")]))
    assert not theirs.header_table.dynamic_entries


def test_a_list_over_the_limit_still_moves_the_table() -> None:
    theirs, ours = hpack.Encoder(), Decoder(100)
    with pytest.raises(ListTooLargeError) as caught:
        ours.decode(theirs.encode([(b"one", b"x" * 60), (b"two", b"y" * 60)]))
    assert caught.value.size == 2 * (3 + 60 + 32)
    assert ours.decode(theirs.encode([(b"two", b"y" * 60)])) == [(b"two", b"y" * 60)]


def test_a_warm_head_is_one_byte_a_field() -> None:
    fields = [(b":method", b"POST"), (b":path", b"/v1/chat/completions"), (b"user-agent", b"x/1"), (b"accept", b"*/*")]
    encoder = Encoder()
    encoder.encode(fields)
    assert len(encoder.encode(fields)) == len(fields)


def test_a_block_that_was_seen_means_what_the_table_says_now() -> None:
    decoder = Decoder(1 << 16)
    decoder.decode(b"\x40\x01a\x01b")
    assert decoder.decode(b"\xbe") == decoder.decode(b"\xbe") == [(b"a", b"b")]
    decoder.decode(b"\x40\x01c\x01d")
    assert decoder.decode(b"\xbe") == [(b"c", b"d")]
    decoder.decode(b"\x20\x3f\xe1\x1f")  # emptied, and 4096 bytes again
    with pytest.raises(CompressionError):
        decoder.decode(b"\xbe")


def test_what_a_coder_remembers_is_bounded() -> None:
    encoder, decoder = Encoder(), Decoder(1 << 16)
    for number in range(2000):
        fields = [
            (b"authorization", b"%d" % number),
            (b"date", b"%d" % number),
            (b"x-%d" % number, b"%d" % number * 20),
        ]
        assert decoder.decode(encoder.encode(fields)) == fields
    remembered = [encoder._literals, encoder._seen_once, decoder._known, decoder._strings]
    assert max(len(memo) for memo in remembered) <= 128

"""The pages of a step's sequences as compressed rows (CSR), out of the table of all seats. Knows ids only. Triton.

FlashInfer reads page lists one behind another; we keep a table with a row per seat. One launch turns what a step needs
of the one into the other, on the device, from lengths that the host need not send twice.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["table_stride", "num_seqs", "num_decode"])
def page_lists(
    table,
    table_stride,
    seats,
    kv_lens,
    q_starts,
    indptr,
    last_page_lens,
    chunk_starts,
    indices,
    num_seqs,
    num_decode,
    PAGE_TOKENS: tl.constexpr,
    SEQS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the page list of the program's sequence, and where it begins.

    Args:
        table: [seats, table_stride] int32.   seats: [num_seqs] int32.   kv_lens: [num_seqs] int32, each >= 1.
        q_starts: [num_seqs + 1] int32, first row of each sequence.
        indptr: [num_seqs + 1] int32, out: where each sequence's pages begin.
        last_page_lens: [num_seqs] int32, out: tokens in each last page.
        chunk_starts: [num_seqs - num_decode + 1] int32, out: first rows of the sequences after the first `num_decode`,
            counted from the first of them.
        indices: [indptr[num_seqs]] int32, out: page ids.
        SEQS: a power of two >= num_seqs. Every program adds the lengths before its own: cheaper than another launch.
    """
    s = tl.program_id(0)
    i = tl.arange(0, SEQS)
    before = tl.load(kv_lens + i, mask=i < s, other=0)
    first = tl.sum((before + PAGE_TOKENS - 1) // PAGE_TOKENS, 0)
    length = tl.load(kv_lens + s)
    count = (length + PAGE_TOKENS - 1) // PAGE_TOKENS
    tl.store(indptr + s, first)
    tl.store(last_page_lens + s, length - (count - 1) * PAGE_TOKENS)
    if s >= num_decode:
        tl.store(chunk_starts + s - num_decode, tl.load(q_starts + s) - num_decode)
    if s == num_seqs - 1:
        tl.store(indptr + num_seqs, first + count)
        tl.store(chunk_starts + num_seqs - num_decode, tl.load(q_starts + num_seqs) - num_decode)
    pages = table + tl.load(seats + s).to(tl.int64) * table_stride
    j = tl.arange(0, BLOCK)
    for at in range(0, count, BLOCK):
        inside = at + j < count
        tl.store(indices + first + at + j, tl.load(pages + at + j, mask=inside, other=0), mask=inside)

"""The C side of rows.py."""

def pack(row: object, position: tuple[int, int, int, int, int], place: int, waited_us: int) -> bytes | None:
    """The 64 bytes of a row, or None if a value has the wrong type or range."""

class Fault(Exception):
    """`args` are (kind, owner): what is wrong, and whose row it is."""

class Rows:
    """All rows of one exchange, checked. A *batch* is a row with tokens that is no dummy."""

    data: bytes
    """As gathered: 64 bytes for each rank."""
    any_flags: int
    """The flags that any row has."""
    all_flags: int
    """The flags that all rows have."""
    batch_flags: int
    """The flags that any batch has."""
    batches: int
    """How many batches there are."""
    holds_work: int
    """Whether any row holds work; tokens are work."""
    graph_mode: int
    """The least graph mode of all rows."""
    best_graph_mode: int
    last: int
    """Who waited least in the exchange before this one, so was the last to arrive in it."""
    most_waited: int
    """The longest wait of the exchange before this one, in microseconds."""
    substeps: int
    """The most sub-steps of all rows."""
    least_tokens: int
    """Of the batches; 0 if there is none."""
    most_tokens: int
    most_padded: int
    """Of the batches: their tokens, or with their own padding."""
    most_query: int
    """The longest query of the batches."""
    uniform: int
    """uniform_token_count, if all batches have the same; else -1."""
    forward_mode: int
    """forward_mode, if all batches have the same; else -1."""
    sum_tokens: int
    """Of the batches."""

    def __new__(cls, data: bytes, mine: bytes, place: int) -> Rows: ...
    def __len__(self) -> int: ...
    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens of each rank's batch; 0 for a dummy."""

    def column(self, word: int) -> tuple[int, ...]:
        """One word of every row, as it was written."""

    def words(self, rank: int) -> tuple[int, ...]:
        """All 16 words of one row, as they were written."""

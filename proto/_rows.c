/* Rows as they were gathered: checked, counted and kept as bytes; a column is decoded when somebody reads it.

   rows.py has the layout and the words for what is wrong; here is the one pass over all rows that every step makes.
   In Python it took 10 us for each rank, more than the exchange itself. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "rows are little-endian, and so must this machine be"
#endif

#define ROW_BYTES 64
#define WORDS 16
#define HEADER_BYTES 16
#define GRAPH_MODES 3
#define SENTINEL (-1)

enum { FLAGS = 4, TOKENS, PADDED, REQS, UNIFORM, QUERY, LOGPROB, MODES, FURTHER, ENGINE, ENGINE_2, CRC };
enum { HAS_WORK = 1, HAS_PREFILL = 2, CAN_GRAPH = 4, WANTS_UB = 8, HOLD = 16, ERROR = 32, DUMMY = 64, CAN_FORWARD = 128 };

typedef struct {
    PyObject_HEAD
    PyObject *data; /* size * 64 bytes */
    Py_ssize_t size;
    int any_flags, all_flags; /* of all rows: or, and */
    int batch_flags;          /* or of the rows that carry a batch */
    int batches;              /* rows with tokens that are no dummies */
    int holds_work;
    int graph_mode;           /* the least of all rows */
    int substeps;             /* the most of all rows */
    int least_tokens, most_tokens, most_padded, most_query;
    int uniform, forward_mode; /* agreed among batches; -1: none or differing */
    long long sum_tokens;
} Rows;

static PyObject *Fault; /* (kind, owner): what is wrong, and whose row it is */

static uint32_t table[4][256];

static void make_tables(void)
{
    for (uint32_t n = 0; n < 256; n++) {
        uint32_t crc = n;
        for (int bit = 0; bit < 8; bit++)
            crc = crc & 1 ? 0xEDB88320u ^ crc >> 1 : crc >> 1;
        table[0][n] = crc;
    }
    for (int slice = 1; slice < 4; slice++)
        for (uint32_t n = 0; n < 256; n++)
            table[slice][n] = table[slice - 1][n] >> 8 ^ table[0][table[slice - 1][n] & 0xFF];
}

/* The CRC-32 of zlib over the first 15 words, four bytes at a time. */
static uint32_t crc_of(const int32_t *words)
{
    uint32_t crc = 0xFFFFFFFFu;
    for (int n = 0; n < CRC; n++) {
        crc ^= (uint32_t)words[n];
        crc = table[3][crc & 0xFF] ^ table[2][crc >> 8 & 0xFF] ^ table[1][crc >> 16 & 0xFF] ^ table[0][crc >> 24];
    }
    return ~crc;
}

static void row_at(const char *data, Py_ssize_t rank, int32_t *words) { memcpy(words, data + rank * ROW_BYTES, ROW_BYTES); }

static int graph_mode_of(const int32_t *words) { return words[FLAGS] >> 8 & 0xFF; }

static int is_plausible(const int32_t *words)
{
    int dummy = (words[FLAGS] & DUMMY) != 0;
    return dummy == (words[TOKENS] == SENTINEL) && words[TOKENS] >= SENTINEL && words[PADDED] >= 0 && words[REQS] >= 0 &&
           words[UNIFORM] >= -1 && words[QUERY] >= 0 && words[LOGPROB] >= 0 && graph_mode_of(words) < GRAPH_MODES &&
           (words[PADDED] == 0 || dummy || words[PADDED] >= words[TOKENS]);
}

static int more(int one, int other) { return one > other ? one : other; }

static int agreed(int before, int now, int first) { return first || before == now ? now : -1; }

static void count(Rows *self, const int32_t *words)
{
    int flags = words[FLAGS] & 0xFF, mode = graph_mode_of(words);
    self->any_flags |= flags;
    self->all_flags &= flags;
    self->graph_mode = mode < self->graph_mode ? mode : self->graph_mode;
    self->substeps = more(self->substeps, words[MODES] >> 16 & 0xFFFF);
    self->holds_work |= (flags & HAS_WORK) != 0;
    if (flags & DUMMY || words[TOKENS] == 0)
        return;
    int first = self->batches++ == 0;
    self->holds_work = 1;
    self->batch_flags |= flags;
    self->sum_tokens += words[TOKENS];
    self->least_tokens = first || words[TOKENS] < self->least_tokens ? words[TOKENS] : self->least_tokens;
    self->most_tokens = more(self->most_tokens, words[TOKENS]);
    self->most_padded = more(self->most_padded, more(words[TOKENS], words[PADDED]));
    self->most_query = more(self->most_query, words[QUERY]);
    self->uniform = agreed(self->uniform, words[UNIFORM], first);
    self->forward_mode = agreed(self->forward_mode, words[MODES] & 0xFFFF, first);
}

static int fault(const char *kind, Py_ssize_t owner)
{
    PyObject *facts = Py_BuildValue("(sn)", kind, owner);
    if (facts != NULL) {
        PyErr_SetObject(Fault, facts);
        Py_DECREF(facts);
    }
    return -1;
}

static int read_rows(Rows *self, const char *mine, Py_ssize_t place)
{
    const char *data = PyBytes_AS_STRING(self->data);
    int32_t words[WORDS];
    for (Py_ssize_t rank = 0; rank < self->size; rank++) {
        row_at(data, rank, words);
        if (crc_of(words) != (uint32_t)words[CRC])
            return fault("checksum", rank);
        if ((words[FLAGS] >> 16 & 0xFFFF) != rank)
            return fault("owner", rank);
    }
    if (memcmp(data + place * ROW_BYTES, mine, ROW_BYTES))
        return fault("own row", place);
    for (Py_ssize_t rank = 0; rank < self->size; rank++)
        if (memcmp(data + rank * ROW_BYTES, mine, HEADER_BYTES))
            return fault("header", rank);
    self->all_flags = 0xFF;
    self->graph_mode = GRAPH_MODES - 1;
    self->uniform = self->forward_mode = -1;
    for (Py_ssize_t rank = 0; rank < self->size; rank++) {
        row_at(data, rank, words);
        if (!is_plausible(words))
            return fault("body", rank);
        count(self, words);
    }
    return 0;
}

static PyObject *new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyObject *data, *mine;
    Py_ssize_t place;
    if (keywords != NULL && PyDict_GET_SIZE(keywords)) {
        PyErr_SetString(PyExc_TypeError, "Rows takes no keywords");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "SSn", &data, &mine, &place))
        return NULL;
    Py_ssize_t size = PyBytes_GET_SIZE(data) / ROW_BYTES;
    if (PyBytes_GET_SIZE(mine) != ROW_BYTES || PyBytes_GET_SIZE(data) % ROW_BYTES || place < 0 || place >= size) {
        fault("length", place);
        return NULL;
    }
    Rows *self = (Rows *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->data = Py_NewRef(data);
    self->size = size;
    if (read_rows(self, PyBytes_AS_STRING(mine), place) < 0)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static void dealloc(Rows *self)
{
    Py_XDECREF(self->data);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static Py_ssize_t length(Rows *self) { return self->size; }

/* A tuple of one number for each rank. */
static PyObject *numbers(const Rows *self, int (*of)(const int32_t *words, int which), int which)
{
    PyObject *all = PyTuple_New(self->size);
    int32_t words[WORDS];
    for (Py_ssize_t rank = 0; all != NULL && rank < self->size; rank++) {
        row_at(PyBytes_AS_STRING(self->data), rank, words);
        PyObject *number = PyLong_FromLong(of(words, which));
        if (number == NULL)
            Py_CLEAR(all);
        else
            PyTuple_SET_ITEM(all, rank, number);
    }
    return all;
}

static int word(const int32_t *words, int which) { return words[which]; }
static int tokens(const int32_t *words, int which) { return words[FLAGS] & DUMMY ? 0 : words[TOKENS]; }

static PyObject *get_tokens(Rows *self, void *unused) { return numbers(self, tokens, 0); }

PyDoc_STRVAR(column_doc, "column(word) -> tuple[int, ...]\n\nOne word of every row, as it was written.");
static PyObject *column(Rows *self, PyObject *which)
{
    long index = PyLong_AsLong(which);
    if (index == -1 && PyErr_Occurred())
        return NULL;
    if (index < 0 || index >= WORDS)
        return PyErr_Format(PyExc_IndexError, "a row has words 0 to %d", WORDS - 1);
    return numbers(self, word, (int)index);
}

PyDoc_STRVAR(words_doc, "words(rank) -> tuple[int, ...]\n\nAll 16 words of one row, as they were written.");
static PyObject *words_of(Rows *self, PyObject *rank)
{
    Py_ssize_t index = PyLong_AsSsize_t(rank);
    if (index == -1 && PyErr_Occurred())
        return NULL;
    if (index < 0 || index >= self->size)
        return PyErr_Format(PyExc_IndexError, "there are %zd rows", self->size);
    int32_t words[WORDS];
    row_at(PyBytes_AS_STRING(self->data), index, words);
    PyObject *all = PyTuple_New(WORDS);
    for (int n = 0; all != NULL && n < WORDS; n++) {
        PyObject *number = PyLong_FromLong(words[n]);
        if (number == NULL)
            Py_CLEAR(all);
        else
            PyTuple_SET_ITEM(all, n, number);
    }
    return all;
}

static PyObject *compare(PyObject *one, PyObject *other, int how)
{
    if (Py_TYPE(one) != Py_TYPE(other) || (how != Py_EQ && how != Py_NE))
        Py_RETURN_NOTIMPLEMENTED;
    return PyObject_RichCompare(((Rows *)one)->data, ((Rows *)other)->data, how);
}

static Py_hash_t hash(Rows *self) { return PyObject_Hash(self->data); }

#define COUNT(name, text) {#name, T_INT, offsetof(Rows, name), READONLY, text}
static PyMemberDef members[] = {
    {"data", T_OBJECT_EX, offsetof(Rows, data), READONLY, "As gathered: 64 bytes for each rank."},
    COUNT(any_flags, "The flags that any row has."),
    COUNT(all_flags, "The flags that all rows have."),
    COUNT(batch_flags, "The flags that any row with a batch has."),
    COUNT(batches, "Rows with a batch: tokens, and no dummy."),
    COUNT(holds_work, "Whether any row holds work; tokens are work."),
    COUNT(graph_mode, "The least graph mode of all rows."),
    COUNT(substeps, "The most sub-steps of all rows."),
    COUNT(least_tokens, "Of the batches; 0 if there is none."),
    COUNT(most_tokens, "Of the batches."),
    COUNT(most_padded, "Of the batches: their tokens, or with their own padding."),
    COUNT(most_query, "The longest query of the batches."),
    COUNT(uniform, "uniform_token_count, if all batches have the same; else -1."),
    COUNT(forward_mode, "forward_mode, if all batches have the same; else -1."),
    {"sum_tokens", T_LONGLONG, offsetof(Rows, sum_tokens), READONLY, "Of the batches."},
    {NULL},
};

static PyGetSetDef properties[] = {
    {"tokens", (getter)get_tokens, NULL, "Tokens of each rank's batch; 0 for a dummy.", NULL},
    {NULL},
};

static PyMethodDef methods[] = {
    {"column", (PyCFunction)column, METH_O, column_doc},
    {"words", (PyCFunction)words_of, METH_O, words_doc},
    {NULL},
};

static PySequenceMethods sequence = {.sq_length = (lenfunc)length};

static PyTypeObject RowsType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "wavekeeper.proto._rows.Rows",
    .tp_doc = "Rows(data, mine, place)\n\nAll rows of one exchange, checked; see rows.py.",
    .tp_basicsize = sizeof(Rows),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_new = new,
    .tp_dealloc = (destructor)dealloc,
    .tp_richcompare = compare,
    .tp_hash = (hashfunc)hash,
    .tp_as_sequence = &sequence,
    .tp_members = members,
    .tp_getset = properties,
    .tp_methods = methods,
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_rows",
    .m_doc = "All rows of one exchange: see rows.py.",
    .m_size = -1,
};

PyMODINIT_FUNC PyInit__rows(void)
{
    PyObject *self;
    make_tables();
    if (PyType_Ready(&RowsType) < 0 || (self = PyModule_Create(&module)) == NULL)
        return NULL;
    Fault = PyErr_NewExceptionWithDoc("wavekeeper.proto._rows.Fault", "(kind, owner)", NULL, NULL);
    if (Fault == NULL || PyModule_AddObjectRef(self, "Fault", Fault) < 0 ||
        PyModule_AddObjectRef(self, "Rows", (PyObject *)&RowsType) < 0)
        Py_CLEAR(self);
    return self;
}

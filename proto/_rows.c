/* Rows as bytes: one row out; and all rows as they were gathered, checked, counted, and decoded when somebody reads them.

   rows.py has the layout and the words for what is wrong; here is what every step does. In Python it took 10 us for each
   rank, more than the exchange itself. */

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

enum { FLAGS = 4, TOKENS, PADDED, REQS, UNIFORM, QUERY, LOGPROB, MODES, WAITED, ENGINE, ENGINE_2, CRC };
enum { HAS_WORK = 1, HAS_PREFILL = 2, CAN_GRAPH = 4, WANTS_UB = 8, HOLD = 16, ERROR = 32, DUMMY = 64, CAN_FORWARD = 128 };

typedef struct {
    PyObject_HEAD
    PyObject *data; /* size * 64 bytes */
    Py_ssize_t size;
    int any_flags, all_flags; /* of all rows: or, and */
    int batch_flags;          /* or of the rows that carry a batch */
    int batches;              /* rows with tokens that are no dummies */
    int holds_work;
    int graph_mode, best_graph_mode; /* the least and the best of all rows */
    int last;                 /* who waited least in the exchange before: the one that the others waited for */
    int least_waited, most_waited;
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
           words[UNIFORM] >= -1 && words[QUERY] >= 0 && words[LOGPROB] >= 0 && words[WAITED] >= 0 &&
           graph_mode_of(words) < GRAPH_MODES &&
           (words[PADDED] == 0 || dummy || words[PADDED] >= words[TOKENS]);
}

static int more(int one, int other) { return one > other ? one : other; }

static int agreed(int before, int now, int first) { return first || before == now ? now : -1; }

static void count(Rows *self, const int32_t *words, int rank)
{
    int flags = words[FLAGS] & 0xFF, mode = graph_mode_of(words);
    self->any_flags |= flags;
    self->all_flags &= flags;
    self->graph_mode = mode < self->graph_mode ? mode : self->graph_mode;
    self->best_graph_mode = more(self->best_graph_mode, mode);
    self->most_waited = more(self->most_waited, words[WAITED]);
    if (rank == 0 || words[WAITED] < self->least_waited) {
        self->least_waited = words[WAITED];
        self->last = rank;
    }
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
        count(self, words, (int)rank);
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

/* --- one row out ------------------------------------------------------------------------------------------------- */

#define LAYOUT 1
#define FLAG_FIELDS 8
#define COUNT_FIELDS 6

static const char *const flag_names[FLAG_FIELDS] = {"has_work",       "has_prefill", "can_run_graph", "wants_microbatch",
                                                    "hold_requested", "local_error", "dummy",         "can_forward"};
static const struct {
    const char *name;
    int word;
    int optional; /* None is written as -1 */
} counts[COUNT_FIELDS] = {{"num_tokens", TOKENS, 0},     {"num_tokens_padded", PADDED, 0},
                          {"num_reqs", REQS, 0},         {"uniform_token_count", UNIFORM, 1},
                          {"max_query_len", QUERY, 0},   {"num_tokens_for_logprob", LOGPROB, 0}};
static const char *const other_names[] = {"forward_mode", "substeps", "graph_mode", "engine"};
static PyObject *flag_keys[FLAG_FIELDS], *count_keys[COUNT_FIELDS], *other_keys[4];

/* A whole number between two others; anything else, a boolean too, is none. -1: out of its type or range. */
static int number_in(PyObject *value, long least, long most, int32_t *to)
{
    int overflow;
    if (value == NULL)
        return -1;
    if (!PyLong_Check(value) || PyBool_Check(value))
        return -1;
    long number = PyLong_AsLongAndOverflow(value, &overflow);
    if (overflow || number < least || number > most)
        return -1;
    *to = (int32_t)number;
    return 0;
}

static int field_in(PyObject *row, PyObject *key, long least, long most, int32_t *to)
{
    PyObject *value = PyObject_GetAttr(row, key);
    int wrong = number_in(value, least, most, to);
    Py_XDECREF(value);
    return wrong;
}

static int read_flags(PyObject *row, int32_t *flags)
{
    for (int n = 0; n < FLAG_FIELDS; n++) {
        PyObject *value = PyObject_GetAttr(row, flag_keys[n]);
        int is_true = value == NULL ? -1 : PyObject_IsTrue(value);
        Py_XDECREF(value);
        if (is_true < 0)
            return -1;
        *flags |= is_true << n;
    }
    return 0;
}

static int read_counts(PyObject *row, int32_t *words)
{
    for (int n = 0; n < COUNT_FIELDS; n++) {
        PyObject *value = PyObject_GetAttr(row, count_keys[n]);
        int wrong = 0;
        if (value == Py_None && counts[n].optional)
            words[counts[n].word] = -1;
        else
            wrong = number_in(value, 0, INT32_MAX, &words[counts[n].word]);
        Py_XDECREF(value);
        if (wrong)
            return -1;
    }
    return 0;
}

static int read_engine(PyObject *row, int32_t *words)
{
    PyObject *engine = PyObject_GetAttr(row, other_keys[3]);
    int wrong = engine == NULL || !PyTuple_Check(engine) || PyTuple_GET_SIZE(engine) != 2;
    for (int n = 0; !wrong && n < 2; n++)
        wrong = number_in(PyTuple_GET_ITEM(engine, n), INT32_MIN, INT32_MAX, &words[ENGINE + n]);
    Py_XDECREF(engine);
    return wrong ? -1 : 0;
}

static int read_row(PyObject *row, int32_t *words)
{
    int32_t flags = 0, mode, substeps, graph_mode;
    if (read_flags(row, &flags) < 0 || read_counts(row, words) < 0 || read_engine(row, words) < 0 ||
        field_in(row, other_keys[0], 0, 0xFFFF, &mode) < 0 || field_in(row, other_keys[1], 0, 0xFFFF, &substeps) < 0 ||
        field_in(row, other_keys[2], 0, GRAPH_MODES - 1, &graph_mode) < 0)
        return -1;
    if (words[PADDED] != 0 && words[PADDED] < words[TOKENS])
        return -1;
    if (flags & DUMMY)
        words[TOKENS] = SENTINEL;
    words[FLAGS] |= flags | graph_mode << 8;
    words[MODES] = (int32_t)((uint32_t)mode | (uint32_t)substeps << 16);
    return 0;
}

PyDoc_STRVAR(pack_doc, "pack(row, position, place, waited_us) -> bytes | None\n\n"
"The 64 bytes of a row, or None if a value has the wrong type or range.");
static PyObject *pack(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    if (count != 4 || !PyTuple_Check(args[1]) || PyTuple_GET_SIZE(args[1]) != 5) {
        PyErr_SetString(PyExc_TypeError, "pack(row, position, place, waited_us)");
        return NULL;
    }
    int32_t words[WORDS] = {0}, operation, substep, place;
    PyObject **position = ((PyTupleObject *)args[1])->ob_item;
    int wrong = number_in(position[0], 0, 0xFF, &operation) || number_in(position[1], 0, INT32_MAX, &words[1]) ||
                number_in(position[2], 0, INT32_MAX, &words[2]) || number_in(position[3], 0, INT32_MAX, &words[3]) ||
                number_in(position[4], 0, 0xFFFF, &substep) || number_in(args[2], 0, 0xFFFF, &place) ||
                number_in(args[3], 0, INT32_MAX, &words[WAITED]);
    if (!wrong) {
        words[0] = (int32_t)(LAYOUT | (uint32_t)operation << 8 | (uint32_t)substep << 16);
        words[FLAGS] = (int32_t)((uint32_t)place << 16);
        wrong = read_row(args[0], words);
    }
    if (wrong) {
        PyErr_Clear(); /* a field that is not there at all */
        Py_RETURN_NONE;
    }
    words[CRC] = (int32_t)crc_of(words);
    return PyBytes_FromStringAndSize((const char *)words, ROW_BYTES);
}

static int make_keys(void)
{
    for (int n = 0; n < FLAG_FIELDS; n++)
        if ((flag_keys[n] = PyUnicode_InternFromString(flag_names[n])) == NULL)
            return -1;
    for (int n = 0; n < COUNT_FIELDS; n++)
        if ((count_keys[n] = PyUnicode_InternFromString(counts[n].name)) == NULL)
            return -1;
    for (int n = 0; n < 4; n++)
        if ((other_keys[n] = PyUnicode_InternFromString(other_names[n])) == NULL)
            return -1;
    return 0;
}

/* --- as Python sees it ------------------------------------------------------------------------------------------- */

#define COUNT(name, text) {#name, T_INT, offsetof(Rows, name), READONLY, text}
static PyMemberDef members[] = {
    {"data", T_OBJECT_EX, offsetof(Rows, data), READONLY, "As gathered: 64 bytes for each rank."},
    COUNT(any_flags, "The flags that any row has."),
    COUNT(all_flags, "The flags that all rows have."),
    COUNT(batch_flags, "The flags that any row with a batch has."),
    COUNT(batches, "Rows with a batch: tokens, and no dummy."),
    COUNT(holds_work, "Whether any row holds work; tokens are work."),
    COUNT(graph_mode, "The least graph mode of all rows."),
    COUNT(best_graph_mode, "The best graph mode of all rows."),
    COUNT(last, "Who waited least in the exchange before this one, so was the last to arrive in it."),
    COUNT(most_waited, "The longest wait of the exchange before this one, in microseconds."),
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

static PyMethodDef functions[] = {
    {"pack", (PyCFunction)(void (*)(void))pack, METH_FASTCALL, pack_doc},
    {NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_rows",
    .m_doc = "Rows as bytes: see rows.py.",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit__rows(void)
{
    PyObject *self;
    make_tables();
    if (make_keys() < 0 || PyType_Ready(&RowsType) < 0 || (self = PyModule_Create(&module)) == NULL)
        return NULL;
    Fault = PyErr_NewExceptionWithDoc("wavekeeper.proto._rows.Fault", "(kind, owner)", NULL, NULL);
    if (Fault == NULL || PyModule_AddObjectRef(self, "Fault", Fault) < 0 ||
        PyModule_AddObjectRef(self, "Rows", (PyObject *)&RowsType) < 0)
        Py_CLEAR(self);
    return self;
}

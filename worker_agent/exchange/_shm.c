/* The stores, loads and waits of the shared-memory exchange: what Python has no words for (barriers) and no time for.

   shm.py says where things are and decides everything; here is one row out, all rows in. Each rank has an area of
   AREA_BYTES that it alone writes, the sleepers aside:

       +0    doorbell   number of this rank's newest row, modulo 2^32; the futex word
       +4    sleepers   how many sleep on that doorbell
       +8    owner      written by segment.py
       +128  slot 0     the newest row with an even number, 64 bytes
       +256  slot 1     the newest row with an odd number

   Why a reader never gets a mixed row. The owner stores the row and then, with release, the doorbell; a reader loads the
   doorbell with acquire and then the row. So who sees doorbell n sees row n as a whole, on x86-64 and on aarch64 (stlr,
   ldar). A slot is stored over only when nobody reads it any more: rank r stores row n+2 over row n after it has taken
   row n+1 of every rank q; q had stored that row, with release, after it had taken row n of every rank, r's included.
   Release orders earlier loads before the store as well, so those loads of q have happened before r's acquire of q's
   doorbell n+1, and that before r's stores. For the same reason a doorbell is at most one ahead of the number that a
   reader waits for: it is that number, or the next, or the row is not there.

   Why no wake-up is lost. Owner: doorbell, full fence, sleepers. Reader: sleepers, full fence, doorbell, sleep. Of the
   two loads after the fences at least one sees the other's store: either the owner wakes, or the reader does not sleep.
   Between the reader's look and its sleep the kernel compares once more. A reader that dies asleep leaves its count
   behind, which costs its neighbour one needless system call for each row, and nothing else.

   tests/exchange/test_shm_model.py visits every order of these loads and stores that the rules of aarch64 allow. */

#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>

#if !defined(__linux__) || !(defined(__x86_64__) || defined(__aarch64__))
PyMODINIT_FUNC PyInit__shm(void)
{
    PyErr_SetString(PyExc_ImportError, "shared memory between ranks needs Linux on x86-64 or aarch64");
    return NULL;
}
#else

#include <linux/futex.h>
#include <sched.h>
#include <stddef.h>
#include <structmember.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define ROW_BYTES 64
#define AREA_BYTES 384
#define SLOT_AT 128
#define SLOT_BYTES 128
#define PAUSES 64 /* looks between two of the clock and of the scheduler; a few microseconds */

/* How long to spin before the first sleep. To sleep and be woken costs 5 us on bare metal and 50 us on a virtual machine,
   so it pays to spin for about as long as the others have been late of late; but not when that is much longer. */
#define SPIN_LEAST_NS 5000
#define SPIN_MOST_NS 100000 /* unless said otherwise */
#define SKEW_SHARE 8 /* the newest wait counts for so much of the average: one eighth */

typedef struct {
    _Atomic uint32_t doorbell;
    _Atomic uint32_t sleepers;
} Bell;

typedef struct {
    PyObject_HEAD
    Py_buffer memory;
    Py_ssize_t size; /* ranks */
    Py_ssize_t rank; /* our own */
    int open;
    uint32_t number;      /* of our newest row */
    Py_ssize_t seen;      /* every rank below this one, in the order of looking, has been seen to be there */
    long long since_ns;   /* when we first waited for the rows of the newest exchange; 0: not yet */
    long long skew_ns;    /* how long we have been waiting of late, on average */
    long long spin_most_ns;
} Channel;

static long long now_ns(void)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (long long)at.tv_sec * 1000000000LL + at.tv_nsec;
}

static void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

static char *area(const Channel *self, Py_ssize_t rank) { return (char *)self->memory.buf + 64 + rank * AREA_BYTES; }
static Bell *bell(const Channel *self, Py_ssize_t rank) { return (Bell *)area(self, rank); }
static char *slot(const Channel *self, Py_ssize_t rank, uint32_t number)
{
    return area(self, rank) + SLOT_AT + (number & 1) * SLOT_BYTES;
}

/* Whether a doorbell tells of row `number`: it is the newest one, or the one before it. */
static int has_rung(uint32_t doorbell, uint32_t number) { return doorbell - number <= 1; }

static int is_there(const Channel *self, Py_ssize_t rank)
{
    return has_rung(atomic_load_explicit(&bell(self, rank)->doorbell, memory_order_acquire), self->number);
}

static void post(Channel *self, const char *row, uint32_t number)
{
    Bell *mine = bell(self, self->rank);
    memcpy(slot(self, self->rank, number), row, ROW_BYTES);
    atomic_store_explicit(&mine->doorbell, number, memory_order_release);
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&mine->sleepers, memory_order_relaxed))
        syscall(SYS_futex, &mine->doorbell, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
    self->number = number;
    self->seen = 0;
    self->since_ns = 0;
}

/* Look on until somebody is missing. Whether all are there. */
static int look(Channel *self)
{
    for (; self->seen < self->size; self->seen++)
        if (!is_there(self, self->seen))
            return 0;
    return 1;
}

static long long spin_ns(const Channel *self)
{
    long long wanted = 2 * self->skew_ns + SPIN_LEAST_NS;
    if (wanted <= self->spin_most_ns)
        return wanted;
    return SPIN_LEAST_NS < self->spin_most_ns ? SPIN_LEAST_NS : self->spin_most_ns;
}

static void learn(Channel *self)
{
    long long waited = now_ns() - self->since_ns, most = 2 * self->spin_most_ns;
    self->skew_ns += ((waited < most ? waited : most) - self->skew_ns) / SKEW_SHARE;
}

/* Spin, then sleep for at most one slice; whether all rows are there. The GIL is not held. */
static int wait_for_all(Channel *self, int spin, long long slice_ns)
{
    long long spin_until = spin ? now_ns() + spin_ns(self) : 0, slept_until = 0;
    for (;;) {
        for (int n = 0; n < PAUSES; n++) {
            if (look(self))
                return 1;
            relax();
        }
        long long now = now_ns();
        if (now < spin_until) {
            sched_yield(); /* the late one may be waiting for this very core */
            continue;
        }
        if (slept_until == 0)
            slept_until = now + slice_ns;
        else if (now >= slept_until)
            return 0;
        Bell *late = bell(self, self->seen);
        struct timespec slice = {(slept_until - now) / 1000000000LL, (slept_until - now) % 1000000000LL};
        atomic_fetch_add_explicit(&late->sleepers, 1, memory_order_seq_cst);
        atomic_thread_fence(memory_order_seq_cst);
        uint32_t rung = atomic_load_explicit(&late->doorbell, memory_order_relaxed);
        if (!has_rung(rung, self->number))
            syscall(SYS_futex, &late->doorbell, FUTEX_WAIT, rung, &slice, NULL, 0);
        atomic_fetch_sub_explicit(&late->sleepers, 1, memory_order_relaxed);
    }
}

static PyObject *take(Channel *self)
{
    PyObject *rows = PyBytes_FromStringAndSize(NULL, self->size * ROW_BYTES);
    if (rows == NULL)
        return NULL;
    char *to = PyBytes_AS_STRING(rows);
    for (Py_ssize_t rank = 0; rank < self->size; rank++)
        memcpy(to + rank * ROW_BYTES, slot(self, rank, self->number), ROW_BYTES);
    return rows;
}

static int check_open(Channel *self)
{
    if (!self->open)
        PyErr_SetString(PyExc_ValueError, "the channel is closed");
    return self->open;
}

static PyObject *wait_and_take(Channel *self, int spin, long long slice_ns)
{
    int all = look(self);
    if (!all) {
        Py_BEGIN_ALLOW_THREADS
        all = wait_for_all(self, spin, slice_ns);
        Py_END_ALLOW_THREADS
    }
    if (!all)
        Py_RETURN_NONE;
    learn(self);
    return take(self);
}

PyDoc_STRVAR(post_doc, "post(row, number)\n\nWrite row `number` (64 bytes).");
static PyObject *post_(Channel *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "post(row, number)");
        return NULL;
    }
    char *row;
    Py_ssize_t length;
    if (!check_open(self) || PyBytes_AsStringAndSize(args[0], &row, &length) < 0)
        return NULL;
    if (length != ROW_BYTES)
        return PyErr_Format(PyExc_ValueError, "a row is %d bytes, got %zd", ROW_BYTES, length);
    uint32_t number = (uint32_t)PyLong_AsUnsignedLongMask(args[1]);
    if (PyErr_Occurred())
        return NULL;
    post(self, row, number);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(wait_doc, "wait(slice_ns) -> bytes | None\n\n"
"The rows of all ranks with the number of our newest one, or None if some are not there after sleeping for `slice_ns`.\n"
"The first wait for a number spins for a while before it sleeps.");
static PyObject *wait_(Channel *self, PyObject *slice)
{
    long long slice_ns = PyLong_AsLongLong(slice);
    if (PyErr_Occurred() || !check_open(self))
        return NULL;
    int spin = self->since_ns == 0;
    if (spin)
        self->since_ns = now_ns();
    return wait_and_take(self, spin, slice_ns);
}

PyDoc_STRVAR(missing_doc, "missing() -> tuple[int, ...]\n\nRanks whose row of the newest exchange is not there.");
static PyObject *missing(Channel *self, PyObject *unused)
{
    PyObject *found = check_open(self) ? PyList_New(0) : NULL;
    for (Py_ssize_t rank = 0; found != NULL && rank < self->size; rank++) {
        if (is_there(self, rank))
            continue;
        PyObject *number = PyLong_FromSsize_t(rank);
        if (number == NULL || PyList_Append(found, number) < 0)
            Py_CLEAR(found);
        Py_XDECREF(number);
    }
    if (found == NULL)
        return NULL;
    PyObject *ranks = PyList_AsTuple(found);
    Py_DECREF(found);
    return ranks;
}

PyDoc_STRVAR(close_doc, "close()\n\nLet go of the memory. Nothing else may be called after it.");
static PyObject *close_(Channel *self, PyObject *unused)
{
    if (self->open) {
        self->open = 0;
        PyBuffer_Release(&self->memory);
    }
    Py_RETURN_NONE;
}

static int init(Channel *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"memory", "size", "rank", NULL};
    Py_buffer memory;
    Py_ssize_t size, rank;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "w*nn", names, &memory, &size, &rank))
        return -1;
    if (size < 1 || rank < 0 || rank >= size || memory.len < 64 + size * AREA_BYTES || (uintptr_t)memory.buf % 64) {
        PyErr_Format(PyExc_ValueError, "rank %zd of %zd does not fit into %zd bytes", rank, size, memory.len);
        PyBuffer_Release(&memory);
        return -1;
    }
    if (self->open)
        PyBuffer_Release(&self->memory);
    self->memory = memory;
    self->size = size;
    self->rank = rank;
    self->open = 1;
    self->seen = size;
    self->spin_most_ns = SPIN_MOST_NS;
    return 0;
}

static void dealloc(Channel *self)
{
    if (self->open)
        PyBuffer_Release(&self->memory);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMemberDef members[] = {
    {"spin_most_ns", T_LONGLONG, offsetof(Channel, spin_most_ns), 0, "Never spin for longer than that; 0: sleep at once."},
    {NULL},
};

static PyMethodDef methods[] = {
    {"post", (PyCFunction)(void (*)(void))post_, METH_FASTCALL, post_doc},
    {"wait", (PyCFunction)wait_, METH_O, wait_doc},
    {"missing", (PyCFunction)missing, METH_NOARGS, missing_doc},
    {"close", (PyCFunction)close_, METH_NOARGS, close_doc},
    {NULL},
};

static PyTypeObject ChannelType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "wavekeeper.worker_agent.exchange._shm.Channel",
    .tp_doc = "Channel(memory, size, rank)\n\nOne rank's side of a segment of `size` ranks. One thread at a time.",
    .tp_basicsize = sizeof(Channel),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)init,
    .tp_dealloc = (destructor)dealloc,
    .tp_methods = methods,
    .tp_members = members,
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_shm",
    .m_doc = "Rows through shared memory: see shm.py.",
    .m_size = -1,
};

PyMODINIT_FUNC PyInit__shm(void)
{
    PyObject *self;
    if (PyType_Ready(&ChannelType) < 0 || (self = PyModule_Create(&module)) == NULL)
        return NULL;
    if (PyModule_AddIntConstant(self, "AREA_BYTES", AREA_BYTES) < 0 ||
        PyModule_AddObjectRef(self, "Channel", (PyObject *)&ChannelType) < 0)
        Py_CLEAR(self);
    return self;
}

#endif

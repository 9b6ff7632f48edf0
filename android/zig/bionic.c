// What a library that zig made for musl's C library needs beside Android's: names that Android 8 has not, under which musl has them.
#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>

#define HIDDEN __attribute__((visibility("hidden")))

int* __errno(void);
HIDDEN int* __errno_location(void) { return __errno(); }

HIDDEN int bcmp(const void* a, const void* b, size_t n) { return memcmp(a, b, n); }

// Since API 28.
HIDDEN void* aligned_alloc(size_t alignment, size_t size) {
  void* p = NULL;
  return posix_memalign(&p, alignment < sizeof(void*) ? sizeof(void*) : alignment, size) != 0 ? NULL : p;
}

// Names of sysconf have other numbers in Android. Of these the C++ library asks for two.
HIDDEN long sysconf(int name) {
  if (name == _SC_PAGESIZE)
    return (long)getauxval(AT_PAGESZ);
  if (name == _SC_NPROCESSORS_ONLN) {
    unsigned long set[16] = {0}; // 1,024 processors
    const long bytes = syscall(SYS_sched_getaffinity, 0, sizeof set, set);
    long count = 0;
    for (long i = 0; i < bytes / (long)sizeof *set; ++i)
      count += __builtin_popcountl(set[i]);
    return count > 0 ? count : 1;
  }
  return -1;
}

// These two are the C++ library's, which has thread-local variables of ELF for them.
int __cxa_thread_atexit_impl(void (*destroy)(void*), void* object, void* library);
HIDDEN int __cxa_thread_atexit(void (*destroy)(void*), void* object, void* library) {
  return __cxa_thread_atexit_impl(destroy, object, library);
}

struct exceptions { // of a thread; as the C++ ABI lays it out
  void* caught;
  unsigned int uncaught;
};
static __thread struct exceptions exceptions;
HIDDEN struct exceptions* __cxa_get_globals(void) { return &exceptions; }
HIDDEN struct exceptions* __cxa_get_globals_fast(void) { return &exceptions; }

// Thread-local variables by keys of pthreads: Android's linker knows those of ELF since API 29 only. Compilers call this with
// -femulated-tls, and describe a variable so.
struct variable {
  size_t size, align;
  size_t index; // from 1; 0: not yet used
  const void* initial;
};

struct block {
  size_t count;
  void* values[];
};

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_key_t key;
static size_t used;

// Destructors of other keys, which may use thread-local variables, run first: this one asks to be called again, as often as it may.
struct owner {
  int rounds;
  struct block* block;
};

static void destroy(void* pointer) {
  struct owner* owner = pointer;
  if (++owner->rounds < 3) {
    pthread_setspecific(key, owner);
    return;
  }
  for (size_t i = 0; owner->block != NULL && i < owner->block->count; ++i)
    free(owner->block->values[i]);
  free(owner->block);
  free(owner);
}

static void start(void) {
  if (pthread_key_create(&key, destroy) != 0)
    abort();
}

HIDDEN void* __emutls_get_address(struct variable* variable) {
  size_t index = __atomic_load_n(&variable->index, __ATOMIC_ACQUIRE);
  if (index == 0) {
    pthread_once(&once, start);
    pthread_mutex_lock(&mutex);
    index = variable->index;
    if (index == 0) {
      index = ++used;
      __atomic_store_n(&variable->index, index, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&mutex);
  }
  struct owner* owner = pthread_getspecific(key);
  if (owner == NULL) {
    owner = calloc(1, sizeof *owner);
    if (owner == NULL || pthread_setspecific(key, owner) != 0)
      abort();
  }
  size_t count = owner->block != NULL ? owner->block->count : 0;
  if (index > count) {
    struct block* block = realloc(owner->block, sizeof *block + (index + 8) * sizeof(void*));
    if (block == NULL)
      abort();
    memset(block->values + count, 0, (index + 8 - count) * sizeof(void*));
    block->count = index + 8;
    owner->block = block;
  }
  void** value = &owner->block->values[index - 1];
  if (*value == NULL) {
    *value = aligned_alloc(variable->align, variable->size);
    if (*value == NULL)
      abort();
    if (variable->initial != NULL)
      memcpy(*value, variable->initial, variable->size);
    else
      memset(*value, 0, variable->size);
  }
  return *value;
}

/* Lapilli player: runs .lap programs on any Vulkan device. This C ABI is its only interface.
 *
 * Every function returns a status, and never aborts or throws. On failure, lapilli_last_error() returns a sentence that says
 * what was given, what is accepted and what to do.
 *
 * Threads. All functions are thread-safe, also with the same program, run, stream or buffer. As with free(), the caller must
 * ensure three things. When lapilli_destroy, lapilli_release, lapilli_stream_destroy or lapilli_buffer_destroy is called, all
 * other calls with that handle have returned, and none follows. (lapilli_destroy and lapilli_release wait for the device, but
 * not for calls of other threads; a program may be destroyed before its runs are released.) Memory that a call reads is not
 * written concurrently. The memory of lapilli_output is read before lapilli_release.
 *
 * Failures. A call that fails has no effect, and work that was queued or submitted before it still runs. In detail:
 * - LAPILLI_OUT_OF_MEMORY: the call may be repeated. A range that lapilli_buffer_write should have filled is undefined. Work of a
 *   stream that the driver cannot accept for lack of memory is kept, and submitted by a later call. If even that is impossible,
 *   the stream returns LAPILLI_DEVICE_LOST from then on, and so do programs whose states that work should have changed, until
 *   lapilli_reset. lapilli_wait, and lapilli_run_sync after the run, return it if results cannot be read.
 * - LAPILLI_DEVICE_LOST: the driver lost the device, or the case above. The contents of programs, runs, streams and buffers of
 *   that device are lost. Calls with them return this status, except that they can be destroyed. A program that is loaded, or a
 *   stream that is created, afterwards opens the device again, even while the old ones exist.
 * - LAPILLI_TIMEOUT: only if a timeout was given. Calls that wait without one do so until the device is done or lost, however
 *   long that takes: the only limit is the driver's own (most GPU drivers abort work after some seconds).
 *
 * Forks. A device does not survive fork(). In a child of a process that uses Vulkan (that has loaded a program, created a stream
 * or listed devices), every call that needs a device fails at once with LAPILLI_DEVICE_LOST, and destroying does nothing. A
 * process may fork first, and use devices in its children.
 */
#ifndef LAPILLI_H
#define LAPILLI_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#if defined(__GNUC__)
#pragma GCC visibility push(default)
#endif

/* BEGIN CDEF (read by cffi at build time: plain C from here on) */

typedef enum lapilli_status {
  LAPILLI_OK = 0,
  LAPILLI_INVALID_ARGUMENT = 1, /* wrong count, shape, dtype or rank of an input; unknown name */
  LAPILLI_INVALID_FILE = 2,     /* not a program, damaged, truncated, or of another version */
  LAPILLI_IO_ERROR = 3,         /* the file cannot be opened or read */
  LAPILLI_NO_DRIVER = 4,        /* no Vulkan loader or driver on this machine */
  LAPILLI_NO_DEVICE = 5,        /* no such device, or none that satisfies a plan of the program */
  LAPILLI_OUT_OF_MEMORY = 6,    /* host or device memory */
  LAPILLI_DEVICE_LOST = 7,      /* or queued work is, or the process is a fork: see above */
  LAPILLI_TIMEOUT = 8,
  LAPILLI_INTERNAL = 9,
  LAPILLI_UNSUPPORTED = 10, /* the program has host operators, and allow_host is 0 */
  LAPILLI_OUT_OF_RANGE = 11 /* a run computed int64 values that do not fit into 32 bits */
} lapilli_status;

/* clang-format off */
typedef enum lapilli_dtype {
  LAPILLI_BOOL = 0, LAPILLI_UINT8 = 1, LAPILLI_INT8 = 2, LAPILLI_INT16 = 3, LAPILLI_INT32 = 4, LAPILLI_INT64 = 5,
  LAPILLI_FLOAT16 = 6, LAPILLI_BFLOAT16 = 7, LAPILLI_FLOAT32 = 8, LAPILLI_FLOAT64 = 9
} lapilli_dtype;
/* clang-format on */

/* clang-format off */
typedef enum lapilli_device_type {
  LAPILLI_DEVICE_OTHER = 0, LAPILLI_DEVICE_INTEGRATED = 1, LAPILLI_DEVICE_DISCRETE = 2, LAPILLI_DEVICE_VIRTUAL = 3,
  LAPILLI_DEVICE_CPU = 4
} lapilli_device_type;
/* clang-format on */

#define LAPILLI_MAX_RANK 16

typedef struct lapilli_program lapilli_program; /* a loaded program on one device */
typedef struct lapilli_run lapilli_run;         /* one run in flight or finished */
typedef struct lapilli_stream lapilli_stream;   /* ordered work on one device, and the memory that it uses */
typedef struct lapilli_buffer lapilli_buffer;   /* device memory of a stream */

/* A dense row-major tensor in host memory. */
typedef struct lapilli_tensor {
  void *data;
  uint64_t size; /* bytes */
  int64_t shape[16];
  uint32_t rank;
  uint32_t dtype; /* lapilli_dtype */
} lapilli_tensor;

/* Limits on the resources of a file and its runs, for files from untrusted sources. 0: the default. New fields are added at the
 * end.
 *
 * Fixed limits: 1,024 methods; per method 64 plans, 1,024 symbols, 4,096 inputs and 4,096 outputs with at most 16 dimensions;
 * per plan 32,768 buffers, 65,536 commands in a run and as many at load; 65,536 kernels with at most 32 bindings and 128 bytes of
 * push constants; 16,384 states; names of 65,536 bytes, those of symbols 256. A buffer is at most 4,096 bytes larger than the constant,
 * state, input or output in it. Parsed structure takes at most four times its size in the file, plus 1 MiB. */
typedef struct lapilli_limits {
  uint64_t struct_size;       /* sizeof(lapilli_limits) */
  uint64_t structure_bytes;   /* of the tables: 64 MiB */
  uint64_t code_bytes;        /* SPIR-V of all kernels together: 256 MiB */
  uint64_t entries;           /* items of all lists in the tables: 4,194,304 */
  uint64_t expressions;       /* of all methods: 1,048,576 */
  uint64_t description_bytes; /* JSON of lapilli_describe: 64 MiB */
  uint64_t device_bytes;      /* memory of a program and its runs, on the device and for transfers: no limit */
  uint64_t groups;            /* work groups of one command: 2^30 */
  uint64_t run_nanoseconds;   /* longest wait of lapilli_run_sync, lapilli_wait and lapilli_release: no limit */
} lapilli_limits;

/* A Vulkan device that the application has, for programs and streams on it: they create no instance, device or queue. The handles are
 * those of vulkan.h. All of it stays until the programs, runs, streams and buffers on it are gone; then nothing is destroyed. The
 * device has robustBufferAccess. Programs use what was turned on when it was created, and nothing else. Work that the application
 * submits to the queue after lapilli_flush or lapilli_submit comes after the player's; it needs a barrier. */
typedef struct lapilli_vulkan {
  void *get_instance_proc_addr;  /* PFN_vkGetInstanceProcAddr */
  void *instance;                /* VkInstance */
  void *physical_device;         /* VkPhysicalDevice */
  void *device;                  /* VkDevice */
  void *queue;                   /* VkQueue that computes */
  uint32_t queue_family;         /* of the queue */
  uint32_t api_version;          /* VkApplicationInfo::apiVersion of the instance */
  const char *const *extensions; /* VkDeviceCreateInfo::ppEnabledExtensionNames */
  uint32_t n_extensions;         /* their number */
  const void *features;          /* VkPhysicalDeviceFeatures2 with its chain, as vkCreateDevice was given it */
  void (*lock)(void *user);      /* called before the queue is used, and unlock after it; null: the application does not use it */
  void (*unlock)(void *user);    /* on other threads meanwhile */
  void *user;
} lapilli_vulkan;

typedef struct lapilli_load_options {
  const char *device;           /* index, part of a name, or UUID; NULL: the environment variable LAPILLI_DEVICE, or the best one */
  const char *plan;             /* name of the plan to use; NULL: the first that the device satisfies */
  const char *cache_dir;        /* pipeline cache; NULL: the user's cache folder; "": no cache on disk */
  uint64_t staging_size;        /* bytes of the upload buffer; 0: 16 to 64 MiB, by the constants */
  int32_t skip_checksum;        /* 1: do not verify the checksum (structure is always verified) */
  int32_t validation;           /* 1: enable VK_LAYER_KHRONOS_validation with synchronization validation */
  int32_t allow_host;           /* 1: accept programs with host operators, which the caller computes between its methods */
  int32_t first_run;            /* 1: check once for each file and driver that the device computes right; see below */
  const lapilli_limits *limits; /* NULL: the defaults */
  const lapilli_vulkan *vulkan; /* a device of the application, instead of `device`; only needed during the call */
} lapilli_load_options;

typedef struct lapilli_memory_info {
  uint64_t constants;    /* bytes on the device: constants and packed constants */
  uint64_t states;       /* bytes on the device: states and their initial values */
  uint64_t arena;        /* bytes of one run's arena at the sizes last recorded */
  uint64_t arena_sum;    /* bytes all arena tensors would take without sharing */
  uint64_t io;           /* bytes of input and output buffers */
  uint64_t device_total; /* all device memory allocated by this program */
} lapilli_memory_info;

typedef struct lapilli_load_times { /* nanoseconds */
  uint64_t open;                    /* map, verify */
  uint64_t device;                  /* instance and device creation (0 if they exist already) */
  uint64_t pipelines;               /* shader modules and pipelines */
  uint64_t constants;               /* upload and load commands */
  uint64_t total;
} lapilli_load_times;

typedef struct lapilli_method_info {
  const char *name; /* valid as long as the program */
  uint32_t inputs;
  uint32_t outputs;
  uint32_t commands;     /* dispatches per run in the chosen plan */
  uint32_t symbols;      /* see lapilli_symbol */
  uint32_t checks;       /* of int64 results: with some, lapilli_enqueue wants one more output */
  int64_t integer_limit; /* int64 inputs lie within -limit..limit; 0: they fit into 32 bits, and no more is asked */
} lapilli_method_info;

/* A dynamic size of a method: what an axis of an input shows, or, with `given`, what the caller says with every run. */
typedef struct lapilli_symbol_info {
  const char *name; /* valid as long as the program */
  int64_t min, max; /* max -1: no bound */
  int32_t given;
} lapilli_symbol_info;

/* The type and shape of an input or output. A dynamic size has shape -1 and, if known, bounds (-1: unknown or none). */
typedef struct lapilli_spec {
  const char *name; /* valid as long as the program */
  uint32_t dtype;   /* lapilli_dtype */
  uint32_t rank;
  int64_t shape[16];
  int64_t min[16];
  int64_t max[16];
} lapilli_spec;

const char *lapilli_version(void);
const char *lapilli_last_error(void); /* of this thread; never NULL */

/* 64-bit checksum as stored in the header of a file (XXH64 with seed `seed`). */
uint64_t lapilli_checksum(const void *data, uint64_t size, uint64_t seed);

/* Devices, best first: discrete, integrated, virtual, other, CPU. A JSON array of objects: index, name, type, vendor_id,
 * device_id, uuid, driver, driver_version, api_version, memory (bytes), limits {...}, features {...}. The caller frees the
 * string, like all JSON, with lapilli_free. */
lapilli_status lapilli_devices(char **json);
void lapilli_free(void *p);

/* A device without JSON. Texts are UTF-8, shortened where they are longer. */
typedef struct lapilli_device_info {
  char name[256];
  char driver[512];        /* name and version */
  char api_version[32];    /* "1.3.290" */
  uint32_t index;          /* among the devices, as lapilli_load_options takes it; UINT32_MAX: taken from the application */
  uint32_t type;           /* lapilli_device_type */
  uint32_t vendor_id;      /* of PCI */
  uint32_t device_id;      /* of PCI */
  uint64_t memory;         /* bytes */
  uint64_t allocation;     /* bytes of the largest buffer */
  uint64_t alignment;      /* of tensors in a buffer, in bytes */
  uint64_t host_alignment; /* of memory of the host that a stream imports; 0: it cannot */
  uint8_t uuid[16];        /* the same as in CUDA and OpenCL */
} lapilli_device_info;

/* The number of devices, 0 where Vulkan is installed and has none. Without Vulkan: LAPILLI_NO_DRIVER. */
lapilli_status lapilli_device_count(uint32_t *count);
lapilli_status lapilli_device(uint32_t index, lapilli_device_info *info);

/* Loads a program from a file or from memory: a .lap file, or a zip archive with one stored entry that is such a file, as the .pt
 * files of optimize_for_mobile(backend="vulkan") are. Neither is needed after the call returns. If the file changes during the call, the
 * call fails, or the constants are from any state of the file. */
lapilli_status lapilli_load(const char *path, const lapilli_load_options *options, lapilli_program **program);
lapilli_status lapilli_load_memory(const void *data, uint64_t size, const lapilli_load_options *options, lapilli_program **program);
/* What the first-run check (lapilli_load_options.first_run) found, as a sentence: the best plan computes something else than the
 * plainest one, which is therefore used. "": it computes the same, or was not checked. The check runs random inputs where the cache
 * folder has no verdict on this file and driver: three times by each of the two plans. LAPILLI_NO_DEVICE: what the device computes is
 * not repeatable, or the plan that was asked for by name computes something else. Valid as long as the program. */
const char *lapilli_program_warning(lapilli_program *program);
void lapilli_destroy(lapilli_program *program); /* waits for its runs in flight */

/* Verifies and describes a file (no device needed): JSON with methods, symbols, inputs, outputs, plans (requirements,
 * buffers, dispatches), checks of int64 results, kernels, constants, states, host operators, metadata. limits may be null. */
lapilli_status lapilli_describe(const void *data, uint64_t size, int32_t skip_checksum, const lapilli_limits *limits, char **json);
lapilli_status lapilli_describe_file(const char *path, int32_t skip_checksum, const lapilli_limits *limits, char **json);

/* The same of a loaded program, as its file was when it was loaded. */
lapilli_status lapilli_program_describe(lapilli_program *program, char **json);

/* Describes where and how a loaded program runs: JSON {device: {as in lapilli_devices}, methods: [{name, plan, plan_index, missing: [{plan,
 * reasons: [sentences]}]}], states: [names], host_operators: [names], input_path, output_path, pipeline_cache: {file,
 * found, compiled}}. `missing` lists the better plans, and what the device lacks for them. */
lapilli_status lapilli_program_info(lapilli_program *program, char **json);
lapilli_status lapilli_program_device(lapilli_program *program, lapilli_device_info *info);
lapilli_status lapilli_program_memory(lapilli_program *program, lapilli_memory_info *info);
lapilli_status lapilli_program_load_times(lapilli_program *program, lapilli_load_times *times);

/* A text that was stored in the file under a name, or NULL where there is none; valid as long as the program. */
const char *lapilli_metadata(lapilli_program *program, const char *name);

/* The methods of a program, and their inputs and outputs. */
uint32_t lapilli_method_count(lapilli_program *program);
lapilli_status lapilli_method(lapilli_program *program, uint32_t method, lapilli_method_info *info);
lapilli_status lapilli_input_spec(lapilli_program *program, uint32_t method, uint32_t index, lapilli_spec *spec);
lapilli_status lapilli_output_spec(lapilli_program *program, uint32_t method, uint32_t index, lapilli_spec *spec);
lapilli_status lapilli_symbol(lapilli_program *program, uint32_t method, uint32_t index, lapilli_symbol_info *info);
/* Computes the values of all symbols of a method from its inputs. `symbols` must already contain those that are "given"; the others
 * are written. Checks the number of inputs, dtypes, ranks and bounds, as a run does; the data is not read. */
lapilli_status lapilli_symbols(lapilli_program *program, uint32_t method, const lapilli_tensor *inputs, uint32_t n_inputs,
                               int64_t *symbols, uint32_t n_symbols);
/* Writes shape, rank, dtype and size of the first n_outputs outputs for the given values of the method's symbols; data is
 * unchanged. Nothing is run. */
lapilli_status lapilli_output_shapes(lapilli_program *program, uint32_t method, const int64_t *symbols, uint32_t n_symbols,
                                     lapilli_tensor *outputs, uint32_t n_outputs);

/* States: tensors that stay on the device from run to run. Runs of a program with states execute one after another, in order of
 * submission, and each sees the changes of the previous ones. The calls below are part of that order, and wait for earlier
 * runs. */
uint32_t lapilli_state_count(lapilli_program *program);
lapilli_status lapilli_state_spec(lapilli_program *program, uint32_t index, lapilli_spec *spec);
/* Resets all states to their initial values. */
lapilli_status lapilli_reset(lapilli_program *program);
/* Reads one state; size: bytes of the whole tensor. */
lapilli_status lapilli_state_read(lapilli_program *program, uint32_t index, void *data, uint64_t size);
lapilli_status lapilli_state_write(lapilli_program *program, uint32_t index, const void *data, uint64_t size);

/* The memory plan for given sizes, and the work of each command: JSON {arena, sum, lower_bound, buffers: [{buffer, block, offset,
 * size}], commands: [{groups: [x, y, z], flops, bytes}]}. method and plan are indices; symbols: one value per symbol of the
 * method. No device is needed. */
lapilli_status lapilli_plan_memory(const void *data, uint64_t size, int32_t skip_checksum, uint32_t method, uint32_t plan,
                                   const int64_t *symbols, uint32_t n_symbols, char **json);
lapilli_status lapilli_plan_memory_file(const char *path, int32_t skip_checksum, uint32_t method, uint32_t plan,
                                        const int64_t *symbols, uint32_t n_symbols, char **json);

/* Runs a method and waits. The data of outputs points to memory of the caller of at least the output's size; shape, rank, dtype
 * and size are written. If one is too small: LAPILLI_INVALID_ARGUMENT, and the required sizes are written. If int64 results do not
 * fit into the 32 bits in which kernels compute: LAPILLI_OUT_OF_RANGE; no output is written, but states have changed. */
lapilli_status lapilli_run_sync(lapilli_program *program, uint32_t method, const lapilli_tensor *inputs, uint32_t n_inputs,
                                lapilli_tensor *outputs, uint32_t n_outputs);

/* Submits a run without waiting. The inputs are copied before the call returns. */
lapilli_status lapilli_submit(lapilli_program *program, uint32_t method, const lapilli_tensor *inputs, uint32_t n_inputs,
                              lapilli_run **run);
/* As lapilli_submit, for a method with sizes that do not follow from its inputs. sizes: the values of the symbols that
 * lapilli_describe lists as "given", in that order. Other calls with inputs on the host reject such a method. */
lapilli_status lapilli_submit_sized(lapilli_program *program, uint32_t method, const int64_t *sizes, uint32_t n_sizes,
                                    const lapilli_tensor *inputs, uint32_t n_inputs, lapilli_run **run);
/* Waits for a run; timeout in nanoseconds (UINT64_MAX: no limit). LAPILLI_TIMEOUT if it is not finished by then,
 * LAPILLI_OUT_OF_RANGE as for lapilli_run_sync. */
lapilli_status lapilli_wait(lapilli_run *run, uint64_t timeout);
/* Output `index` of a run, after a successful wait. data points to memory of the run, valid until lapilli_release. */
lapilli_status lapilli_output(lapilli_run *run, uint32_t index, lapilli_tensor *tensor);
/* Frees a run; waits if it is still in flight. */
void lapilli_release(lapilli_run *run);

/* Times every dispatch of a run with GPU timestamps: nanoseconds[i] for run command i of the plan (0 if it is skipped), and the
 * time of the whole run in *total. n is the capacity; *count receives the number of commands. Each dispatch is timed alone (with
 * barriers before and after), `repeat` times; the median is reported. States are unchanged. */
lapilli_status lapilli_profile(lapilli_program *program, uint32_t method, const lapilli_tensor *inputs, uint32_t n_inputs,
                               uint32_t repeat, uint64_t *nanoseconds, uint32_t n, uint32_t *count, uint64_t *total);

/* Copies the contents of a device buffer of the plan to data, after running up to and including command `command` (for
 * verification). States are unchanged. */
lapilli_status lapilli_read_buffer(lapilli_program *program, uint32_t method, const lapilli_tensor *inputs, uint32_t n_inputs,
                                   uint32_t command, uint32_t buffer, void *data, uint64_t size);

/* Streams: work queued on a stream executes in the order of the calls, as if one after another; calls return before it is done.
 * Calls from several threads are ordered by their arrival. */

/* The position of a dense row-major tensor in a buffer. The offset is a multiple of the device's alignment (see
 * lapilli_stream_info). */
typedef struct lapilli_slice {
  lapilli_buffer *buffer;
  uint64_t offset; /* bytes */
} lapilli_slice;

typedef struct lapilli_stream_memory_info { /* in bytes, except the last one */
  uint64_t allocated;                       /* by existing buffers and temporary tensors */
  uint64_t peak_allocated;                  /* the maximum of that so far */
  uint64_t reserved;                        /* obtained from the driver: allocated and cached */
  uint64_t limit;                           /* for reserved */
  uint64_t allocations;                     /* number of the driver's memory objects */
} lapilli_stream_memory_info;

/* options: only device and validation are used; may be null. */
lapilli_status lapilli_stream_create(const lapilli_load_options *options, lapilli_stream **stream);
/* Buffers may outlive their stream; its memory is freed when all of them are destroyed. */
void lapilli_stream_destroy(lapilli_stream *stream);
/* A stream on the device of a program. */
lapilli_status lapilli_program_stream(lapilli_program *program, lapilli_stream **stream);
lapilli_status lapilli_stream_device(lapilli_stream *stream, lapilli_device_info *info);
/* JSON {device: {as in lapilli_devices}, alignment, max_allocation, memory} in bytes. */
lapilli_status lapilli_stream_info(lapilli_stream *stream, char **json);

/* Allocates uninitialized memory, from the stream's cache if possible. LAPILLI_OUT_OF_MEMORY if there is not enough even after all
 * cached memory was freed. `bytes` may be 0. */
lapilli_status lapilli_buffer_create(lapilli_stream *stream, uint64_t bytes, lapilli_buffer **buffer);
/* The memory can be reused at once: work that is already queued executes first. */
void lapilli_buffer_destroy(lapilli_buffer *buffer);
/* Low-overhead variants of the two calls above, for FFI callers. Returns the buffer's address, or 0 on failure;
 * call lapilli_buffer_create for the status. */
intptr_t lapilli_buffer_acquire(lapilli_stream *stream, uint64_t bytes);
void lapilli_buffer_release(intptr_t buffer);
/* Memory that is shared without a copy. lapilli_synchronize returns when others may read what the stream has written, and write
 * what it has read. */
typedef enum lapilli_memory_kind {
  LAPILLI_MEMORY_HOST = 0,            /* an address; see host_alignment */
  LAPILLI_MEMORY_OPAQUE_FD = 1,       /* a file descriptor, for CUDA, OpenCL, and Vulkan of other processes, on the same device */
  LAPILLI_MEMORY_DMA_BUF = 2,         /* a file descriptor, for other devices, cameras, displays */
  LAPILLI_MEMORY_HARDWARE_BUFFER = 3, /* AHardwareBuffer* of format BLOB (Android) */
  LAPILLI_MEMORY_VULKAN_BUFFER = 4    /* VkBuffer of the same VkDevice, usable as storage and by copies */
} lapilli_memory_kind;

typedef struct lapilli_shared_memory {
  uint32_t kind;         /* lapilli_memory_kind */
  intptr_t handle;       /* the address, file descriptor, AHardwareBuffer* or VkBuffer */
  uint64_t memory_bytes; /* of the whole memory object, as cudaImportExternalMemory wants it; an import of another kind: 0 */
  uint64_t offset;       /* of the buffer in it; 0 for an import */
} lapilli_shared_memory;

/* Makes a buffer of memory that others can be told of: OPAQUE_FD or DMA_BUF. LAPILLI_UNSUPPORTED: the device cannot. */
lapilli_status lapilli_buffer_create_shared(lapilli_stream *stream, uint32_t kind, uint64_t bytes, lapilli_buffer **buffer);
/* Tells of a buffer's memory. The caller closes a file descriptor. VULKAN_BUFFER is there for every buffer; the VkBuffer stays the
 * stream's, and memory_bytes and offset say where in it the buffer is. */
lapilli_status lapilli_buffer_export(lapilli_buffer *buffer, uint32_t kind, lapilli_shared_memory *memory);
/* Makes a buffer of memory of somebody else, who keeps it until lapilli_buffer_destroy, which waits for the stream's work. A file
 * descriptor stays the caller's. A tensor that the device cannot use as it lies (some sizes, at the very end of the memory) is
 * copied. */
lapilli_status lapilli_buffer_import(lapilli_stream *stream, const lapilli_shared_memory *memory, uint64_t bytes,
                                     lapilli_buffer **buffer);
/* The data is copied before the call returns; the write executes in the stream's order. */
lapilli_status lapilli_buffer_write(lapilli_buffer *buffer, uint64_t offset, const void *data, uint64_t bytes);
/* Waits for all work queued before; calls of other threads are blocked meanwhile. */
lapilli_status lapilli_buffer_read(lapilli_buffer *buffer, uint64_t offset, void *data, uint64_t bytes);
/* Both buffers belong to the same stream. The ranges may be in the same buffer, but must not overlap. */
lapilli_status lapilli_buffer_copy(lapilli_buffer *from, uint64_t from_offset, lapilli_buffer *to, uint64_t to_offset,
                                   uint64_t bytes);
/* Fills a range with a four-byte pattern; offset and bytes are multiples of 4. */
lapilli_status lapilli_buffer_fill(lapilli_buffer *buffer, uint64_t offset, uint64_t bytes, uint32_t pattern);

/* Queues a run of a method on buffers of the stream. The program is loaded on the same device; it may be destroyed before the run
 * executes. symbols: one value per symbol of the method, in order; they determine the sizes of inputs and outputs. Slices may be
 * in the same buffer. An output may have the position of an input: it is written in place if the kernel that writes it only reads
 * the same element of that input for each element. An output that overlaps an input in any other way, or is written before an
 * input at its position is last read, is computed elsewhere and copied. int64 values of inputs must fit into 32 bits, which is not
 * checked. A method with checks (see lapilli_describe) has an additional output, int32 []: the number of the first check that
 * failed, from 1, or 0. States of the program change in the order of the stream. */
lapilli_status lapilli_enqueue(lapilli_stream *stream, lapilli_program *program, uint32_t method, const int64_t *symbols,
                               uint32_t n_symbols, const lapilli_slice *inputs, uint32_t n_inputs, const lapilli_slice *outputs,
                               uint32_t n_outputs);
/* A dense row-major tensor in a buffer, with its shape. */
typedef struct lapilli_device_tensor {
  lapilli_buffer *buffer;
  uint64_t offset; /* as in lapilli_slice */
  int64_t shape[16];
  uint32_t rank;
  uint32_t dtype; /* lapilli_dtype */
} lapilli_device_tensor;

/* As lapilli_enqueue, for tensors with shapes: they are checked as those of a run on the host, and give the symbols their values;
 * sizes: those of the symbols that are "given". Shape and dtype of the outputs are written. An output without a buffer gets one,
 * which the caller destroys; an output with a buffer has room for the tensor from its offset on. */
lapilli_status lapilli_enqueue_tensors(lapilli_stream *stream, lapilli_program *program, uint32_t method, const int64_t *sizes,
                                       uint32_t n_sizes, const lapilli_device_tensor *inputs, uint32_t n_inputs,
                                       lapilli_device_tensor *outputs, uint32_t n_outputs);
/* LAPILLI_OUT_OF_RANGE with a sentence for the value that the output of a method's checks has, unless that is 0. */
lapilli_status lapilli_check_result(lapilli_program *program, uint32_t method, int32_t value);
/* Low-overhead variant of lapilli_enqueue, for FFI callers. words: method, n_symbols, n_inputs and n_outputs, the symbols, and the
 * buffer's address and the offset of each input and output, all as int64_t (with any alignment). */
lapilli_status lapilli_enqueue_packed(lapilli_stream *stream, lapilli_program *program, const char *words);
/* As lapilli_enqueue_packed, and also creates a buffer: n_outputs is followed by the address of a buffer to destroy first (or 0)
 * and the size of the buffer to create, which slices with address 0 refer to. Returns the new buffer's address, or 0 on failure:
 * nothing was queued or created; call lapilli_buffer_create or lapilli_enqueue_packed for the status. */
intptr_t lapilli_launch(lapilli_stream *stream, lapilli_program *program, const char *words);

/* Submits queued work to the device, without waiting. LAPILLI_OUT_OF_MEMORY: it is still queued. */
lapilli_status lapilli_flush(lapilli_stream *stream);
/* Waits until all queued work is done. */
lapilli_status lapilli_synchronize(lapilli_stream *stream);
lapilli_status lapilli_stream_memory(lapilli_stream *stream, lapilli_stream_memory_info *info);
lapilli_status lapilli_reset_peak_memory(lapilli_stream *stream);
/* Returns unused memory to the driver, after waiting for the work that uses it. */
lapilli_status lapilli_empty_cache(lapilli_stream *stream);
/* Limits the memory obtained from the driver, in bytes; 0: no limit. */
lapilli_status lapilli_set_memory_limit(lapilli_stream *stream, uint64_t bytes);

/* Language models: a program that lapilli.LLM saved writes tokens, one sequence at a time, and chooses them on the device. Text is the
 * caller's: lapilli_metadata(program, "llm.tokenizer") is the tokenizer, as Hugging Face's tokenizer.json, and "llm.text" says as JSON
 * which tokens end a text (ends), and the chat template. */
typedef struct lapilli_writer lapilli_writer;

/* How a token is chosen. */
typedef struct lapilli_sampling {
  float temperature;        /* 0: the likeliest */
  float top_p;              /* of the likeliest tokens that have this probability together; 1: all */
  float min_p;              /* of those at least this many times as likely as the likeliest; 0: all */
  float repetition_penalty; /* of tokens in the prompt and the text; 1: none */
  int32_t top_k;            /* of so many; 0: all */
  int32_t seed;             /* the same prompt, options and seed give the same draws */
} lapilli_sampling;

typedef struct lapilli_writer_info {
  uint32_t context; /* tokens that a prompt may have, and that prompt and text are read of */
  uint32_t words;   /* tokens are 0 to words - 1 */
  uint64_t read;    /* how many tokens were computed so far */
} lapilli_writer_info;

/* The writer uses the program's states: one writer at a time, and no other runs of it. The program stays as long as the writer.
 * LAPILLI_INVALID_ARGUMENT: it is no language model, or one with an encoder. */
lapilli_status lapilli_writer_create(lapilli_program *program, lapilli_writer **writer);
void lapilli_writer_destroy(lapilli_writer *writer);
lapilli_status lapilli_writer_describe(lapilli_writer *writer, lapilli_writer_info *info);
/* What is written next follows these tokens, at least one. What they have in common with the tokens before is not computed again: a
 * conversation gives all of it every time. sampling: NULL: the likeliest tokens. Nothing runs yet. */
lapilli_status lapilli_writer_begin(lapilli_writer *writer, const int32_t *tokens, uint64_t n_tokens,
                                    const lapilli_sampling *sampling);
/* Waits for the next token; log_probability may be NULL. Whether it ends the text is the caller's to say. LAPILLI_OUT_OF_RANGE: the
 * context is full. */
lapilli_status lapilli_writer_next(lapilli_writer *writer, int32_t *token, float *log_probability);

/* END CDEF */

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif
#ifdef __cplusplus
}
#endif
#endif

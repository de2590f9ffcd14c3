// A CUDA runtime, driver and cuBLAS that allocate memory but compute nothing: see __main__.py.
//
// One shared library replaces all three. Functions that torch calls and that are missing here come
// from its own CUDA runtime. Device memory is reserved host memory, which uses no physical memory
// until it is written. Kernels, cuBLAS, synchronisation and large copies do nothing. What is copied to
// the host is zeros: see copy.

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace {

// One H100 SXM.
const char *kName = "NVIDIA H100 (null GPU: computes nothing)";  // appears in every report
const size_t kMemory = 85899345920 - 965345280;  // 79.1 GiB, as torch reports it
// Another compute capability selects other kernels: NULL_GPU_CAPABILITY=80 is an A100's.
const char *kAsked = getenv("NULL_GPU_CAPABILITY");
const int kCapability = kAsked ? atoi(kAsked) : 90;
const int kMajor = kCapability / 10, kMinor = kCapability % 10;
const int kProcessors = 132, kThreads = 2048, kRegisters = 65536;
// Shared memory of a block and of a processor: an A100's, an L40S's or RTX 5090's, or an H100's.
const int kSharedOptIn = kCapability == 80 ? 166912 : kMajor == 8 || kMajor == 12 ? 101376 : 232448;
const int kShared = 49152, kSharedProcessor = kSharedOptIn + 1024, kL2 = 52428800;

// Small tensors (tokens, counters) are copied and filled; weights are not, to save host memory.
const size_t kCopied = 1 << 20;

// How many GPUs: NULL_GPU_COUNT, or none if none is visible. All are the same, each with its memory.
const char *kAskedCount = getenv("NULL_GPU_COUNT"), *kVisible = getenv("CUDA_VISIBLE_DEVICES");
const int kCount = kVisible && !*kVisible ? 0 : kAskedCount ? atoi(kAskedCount) : 1;
thread_local int current = 0;

std::mutex mutex;
std::map<char *, size_t> device, pinned;  // start address and size of each block
std::map<char *, int> owner;              // number of the device of each of its blocks
std::map<int, size_t> used;               // bytes by number of the device

// How often the host would have waited for the device, copied to memory that is not pinned, and
// copied from it: see null_gpu_counts.
long waits, unpinned_to_host, unpinned_to_device;

using Clock = std::chrono::steady_clock;

void *map_pages(size_t bytes) {
  void *p = mmap(nullptr, bytes ? bytes : 1, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? nullptr : p;
}

bool release(std::map<char *, size_t> &blocks, void *p) {
  auto block = blocks.find(static_cast<char *>(p));
  if (block == blocks.end()) return false;
  munmap(p, block->second);
  if (&blocks == &device) used[owner[block->first]] -= block->second, owner.erase(block->first);
  blocks.erase(block);
  return true;
}

bool holds(const std::map<char *, size_t> &blocks, const void *p) {
  auto next = blocks.upper_bound(static_cast<char *>(const_cast<void *>(p)));
  if (next == blocks.begin()) return false;
  --next;
  return p < next->first + next->second;
}

cudaError_t copy(void *to, const void *from, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  bool reads = holds(device, from), writes = holds(device, to);
  if (reads && !writes && !holds(pinned, to)) ++unpinned_to_host;
  if (writes && !reads && !holds(pinned, from)) ++unpinned_to_device;
  if (bytes > kCopied) return cudaSuccess;
  // No kernel has written what the host asks for: zeros are always finite, and a single byte, by
  // which the host asks if something is true, is 1, so that a loop ends.
  return reads && !writes ? memset(to, bytes == 1, bytes) : memmove(to, from, bytes), cudaSuccess;
}

int attribute(int which) {
  switch (which) {  // the same numbers in the runtime and the driver
    case cudaDevAttrComputeCapabilityMajor: return kMajor;
    case cudaDevAttrComputeCapabilityMinor: return kMinor;
    case cudaDevAttrMultiProcessorCount: return kProcessors;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return kThreads;
    case cudaDevAttrMaxThreadsPerBlock: return 1024;
    case cudaDevAttrMaxSharedMemoryPerBlock: return kShared;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return kSharedOptIn;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return kSharedProcessor;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: return kRegisters;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrL2CacheSize: return kL2;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrClockRate: return 1980000;
    case cudaDevAttrMemoryClockRate: return 2619000;
    case cudaDevAttrGlobalMemoryBusWidth: return 5120;
    default: return 1;
  }
}

void *next_handle() {
  static long last = 0;
  return reinterpret_cast<void *>(last += 16);
}

cudaError_t wait() {
  std::lock_guard<std::mutex> lock(mutex);
  return ++waits, cudaSuccess;
}

int nothing() { return 0; }

}  // namespace

extern "C" {

// Waits of the host for the device, and copies to and from memory of the host that is not pinned,
// since the start. A device ends such a copy before it does anything else of the host's.
void null_gpu_counts(long *counts) {
  std::lock_guard<std::mutex> lock(mutex);
  counts[0] = waits, counts[1] = unpinned_to_host, counts[2] = unpinned_to_device;
}

// The runtime ---------------------------------------------------------------------------------

#define NOTHING(name, ...) \
  cudaError_t name(__VA_ARGS__) { return cudaSuccess; }

cudaError_t cudaGetDeviceCount(int *n) { return *n = kCount, cudaSuccess; }
cudaError_t cudaGetDevice(int *n) { return *n = current, cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *v) { return *v = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *v) { return *v = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int, int) { return *can = 0, cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int *v, cudaDeviceAttr which, int) {
  return *v = attribute(which), cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char *id, int length, int which) {
  return snprintf(id, length, "0000:%02x:00.0", which + 1), cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  return *least = 0, *greatest = -5, cudaSuccess;
}
#undef cudaGetDeviceProperties
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, kName);
  p->totalGlobalMem = kMemory;
  p->major = kMajor, p->minor = kMinor, p->multiProcessorCount = kProcessors, p->warpSize = 32;
  p->maxThreadsPerBlock = 1024, p->maxThreadsPerMultiProcessor = kThreads;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->maxBlocksPerMultiProcessor = 32;
  p->regsPerBlock = p->regsPerMultiprocessor = kRegisters;
  p->sharedMemPerBlock = kShared, p->sharedMemPerBlockOptin = kSharedOptIn;
  p->sharedMemPerMultiprocessor = kSharedProcessor;
  p->l2CacheSize = kL2, p->memoryBusWidth = 5120, p->textureAlignment = 512;
  p->unifiedAddressing = p->concurrentKernels = 1;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int which) { return current = which, cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return wait(); }
NOTHING(cudaDeviceEnablePeerAccess, int, unsigned)
NOTHING(cudaGetLastError)
NOTHING(cudaPeekAtLastError)
NOTHING(cudaProfilerStart)
NOTHING(cudaProfilerStop)
const char *cudaGetErrorName(cudaError_t) { return "null_gpu"; }
const char *cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "out of memory" : "error of the null GPU";
}

cudaError_t cudaMalloc(void **p, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  *p = used[current] + bytes > kMemory ? nullptr : map_pages(bytes);
  if (!*p) return cudaErrorMemoryAllocation;
  device[static_cast<char *>(*p)] = bytes, owner[static_cast<char *>(*p)] = current;
  used[current] += bytes;
  return cudaSuccess;
}
cudaError_t cudaFree(void *p) {
  std::lock_guard<std::mutex> lock(mutex);
  return release(device, p), cudaSuccess;
}
cudaError_t cudaMallocAsync(void **p, size_t bytes, cudaStream_t) { return cudaMalloc(p, bytes); }
cudaError_t cudaFreeAsync(void *p, cudaStream_t) { return cudaFree(p); }
cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
  return *free = kMemory - used[current], *total = kMemory, cudaSuccess;
}
cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned) {
  std::lock_guard<std::mutex> lock(mutex);
  *p = map_pages(bytes);
  if (!*p) return cudaErrorMemoryAllocation;
  return pinned[static_cast<char *>(*p)] = bytes, cudaSuccess;
}
cudaError_t cudaFreeHost(void *p) {
  std::lock_guard<std::mutex> lock(mutex);
  return release(pinned, p), cudaSuccess;
}
cudaError_t cudaHostRegister(void *p, size_t bytes, unsigned) {
  std::lock_guard<std::mutex> lock(mutex);
  return pinned[static_cast<char *>(p)] = bytes, cudaSuccess;
}
cudaError_t cudaHostUnregister(void *p) {
  std::lock_guard<std::mutex> lock(mutex);
  return pinned.erase(static_cast<char *>(p)), cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *a, const void *p) {
  std::lock_guard<std::mutex> lock(mutex);
  memset(a, 0, sizeof *a);
  a->type = holds(device, p)   ? cudaMemoryTypeDevice
            : holds(pinned, p) ? cudaMemoryTypeHost
                               : cudaMemoryTypeUnregistered;
  if (a->type == cudaMemoryTypeDevice)
    a->device = std::prev(owner.upper_bound(static_cast<char *>(const_cast<void *>(p))))->second;
  if (a->type != cudaMemoryTypeUnregistered) a->devicePointer = const_cast<void *>(p);
  if (a->type == cudaMemoryTypeHost) a->hostPointer = const_cast<void *>(p);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t n, cudaMemcpyKind) {
  return wait(), copy(to, from, n);
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, cudaMemcpyKind, cudaStream_t) {
  return copy(to, from, n);
}
cudaError_t cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t n, cudaStream_t) {
  return copy(to, from, n);
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                              size_t width, size_t height, cudaMemcpyKind, cudaStream_t) {
  for (size_t row = 0; row < height; ++row)
    copy(static_cast<char *>(to) + row * to_pitch,
         static_cast<const char *>(from) + row * from_pitch, width);
  return cudaSuccess;
}
cudaError_t cudaMemset(void *p, int value, size_t n) {
  if (n <= kCopied) memset(p, value, n);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *p, int value, size_t n, cudaStream_t) {
  return cudaMemset(p, value, n);
}
NOTHING(cudaMemcpyToSymbol, const void *, const void *, size_t, size_t, cudaMemcpyKind)
cudaError_t cudaGetSymbolAddress(void **p, const void *) {
  static char symbols[1 << 20];
  return *p = symbols, cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t *s) {
  return *s = static_cast<cudaStream_t>(next_handle()), cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned) { return cudaStreamCreate(s); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned, int) {
  return cudaStreamCreate(s);
}
cudaError_t cudaStreamGetPriority(cudaStream_t, int *p) { return *p = 0, cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus *s) {
  return *s = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus *s,
                                     unsigned long long *, cudaGraph_t *, const cudaGraphNode_t **,
                                     const cudaGraphEdgeData **, size_t *) {
  return *s = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void *data) {
  return function(data), cudaSuccess;
}
NOTHING(cudaStreamDestroy, cudaStream_t)
NOTHING(cudaStreamQuery, cudaStream_t)
cudaError_t cudaStreamSynchronize(cudaStream_t) { return wait(); }
NOTHING(cudaStreamWaitEvent, cudaStream_t, cudaEvent_t, unsigned)
NOTHING(cudaStreamAddCallback, cudaStream_t, cudaStreamCallback_t, void *, unsigned)
NOTHING(cudaThreadExchangeStreamCaptureMode, cudaStreamCaptureMode *)

// An event holds the host time at which it was recorded.
cudaError_t cudaEventCreate(cudaEvent_t *e) {
  return *e = reinterpret_cast<cudaEvent_t>(new Clock::time_point), cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned) { return cudaEventCreate(e); }
cudaError_t cudaEventDestroy(cudaEvent_t e) {
  return delete reinterpret_cast<Clock::time_point *>(e), cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t) {
  return *reinterpret_cast<Clock::time_point *>(e) = Clock::now(), cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned) {
  return cudaEventRecord(e, s);
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) {
  auto spent = *reinterpret_cast<Clock::time_point *>(to) -
               *reinterpret_cast<Clock::time_point *>(from);
  return *ms = std::chrono::duration<float, std::milli>(spent).count(), cudaSuccess;
}
NOTHING(cudaEventQuery, cudaEvent_t)
cudaError_t cudaEventSynchronize(cudaEvent_t) { return wait(); }

NOTHING(cudaLaunchKernel, const void *, dim3, dim3, void **, size_t, cudaStream_t)
NOTHING(__cudaLaunchKernel, void *, dim3, dim3, void **, size_t, cudaStream_t)
NOTHING(cudaLaunchKernelExC, const cudaLaunchConfig_t *, const void *, void **)
NOTHING(cudaFuncSetAttribute, const void *, cudaFuncAttribute, int)
cudaError_t __cudaGetKernel(void **kernel, const void *) {
  return *kernel = next_handle(), cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *a, const void *) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024, a->numRegs = 32, a->binaryVersion = a->ptxVersion = kCapability;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *, int,
                                                                   size_t, unsigned) {
  return *n = 2, cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult *found) {
  *function = dlsym(RTLD_DEFAULT, name);
  if (!*function) *function = reinterpret_cast<void *>(nothing);
  if (found) *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// The driver, called by Triton and torch's compiled code ---------------------------------------

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *v) { return *v = CUDA_VERSION, CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *n) { return *n = kCount, CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *d, int which) { return *d = which, CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int *v, CUdevice_attribute which, CUdevice) {
  return *v = attribute(which), CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned *flags, int *active) {
  return *flags = 0, *active = 1, CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *c) {
  return *c = reinterpret_cast<CUcontext>(16), CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice) { return cuCtxGetCurrent(c); }
CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *d) { return *d = current, CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *v, CUlimit) { return *v = 1024, CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult, const char **s) { return *s = "null_gpu", CUDA_SUCCESS; }
CUresult cuModuleLoadData(CUmodule *m, const void *) {
  return *m = static_cast<CUmodule>(next_handle()), CUDA_SUCCESS;
}
CUresult cuModuleLoad(CUmodule *m, const char *) { return cuModuleLoadData(m, nullptr); }
CUresult cuModuleLoadDataEx(CUmodule *m, const void *, unsigned, CUjit_option *, void **) {
  return cuModuleLoadData(m, nullptr);
}
CUresult cuModuleGetFunction(CUfunction *f, CUmodule, const char *) {
  return *f = static_cast<CUfunction>(next_handle()), CUDA_SUCCESS;
}
CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
CUresult cuFuncGetAttribute(int *v, CUfunction_attribute which, CUfunction) {
  *v = which == CU_FUNC_ATTRIBUTE_NUM_REGS               ? 32
       : which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024
                                                          : 0;
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
CUresult cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                        unsigned, CUstream, void **, void **) {
  return CUDA_SUCCESS;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *, CUfunction, void **, void **) {
  return CUDA_SUCCESS;
}
CUresult cuLaunchCooperativeKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned,
                                   unsigned, unsigned, CUstream, void **) {
  return CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, CUfunction, int, size_t) {
  return *n = 2, CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveClusters(int *n, CUfunction, const CUlaunchConfig *) {
  return *n = kProcessors / 2, CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void *v, CUpointer_attribute which, CUdeviceptr p) {
  if (which == CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
    *static_cast<CUdeviceptr *>(v) = p;
  else
    memset(v, 0, sizeof(int));
  return CUDA_SUCCESS;
}
CUresult cuTensorMapEncodeTiled(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                                const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                                const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  return CUDA_SUCCESS;
}
CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *,
                                       CUmemAllocationGranularity_flags) {
  return *bytes = 2 << 20, CUDA_SUCCESS;
}
// Memory of expandable segments: addresses are reserved, and memory is mapped there piece by piece.
CUresult cuMemAddressReserve(CUdeviceptr *p, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  *p = reinterpret_cast<CUdeviceptr>(map_pages(bytes));
  return *p ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemAddressFree(CUdeviceptr p, size_t bytes) {
  return munmap(reinterpret_cast<void *>(p), bytes), CUDA_SUCCESS;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes,
                     const CUmemAllocationProp *wanted, unsigned long long) {
  std::lock_guard<std::mutex> lock(mutex);
  if (used[wanted->location.id] + bytes > kMemory) return CUDA_ERROR_OUT_OF_MEMORY;
  used[wanted->location.id] += bytes;
  // Sizes are multiples of 2 MiB: the lowest bits have the number of the device.
  return *handle = bytes | wanted->location.id, CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  std::lock_guard<std::mutex> lock(mutex);
  return used[handle & 15] -= handle & ~15ull, CUDA_SUCCESS;
}
CUresult cuMemMap(CUdeviceptr p, size_t bytes, size_t, CUmemGenericAllocationHandle handle,
                  unsigned long long) {
  std::lock_guard<std::mutex> lock(mutex);
  owner[reinterpret_cast<char *>(p)] = handle & 15;
  return device[reinterpret_cast<char *>(p)] = bytes, CUDA_SUCCESS;
}
CUresult cuMemUnmap(CUdeviceptr p, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  auto start = reinterpret_cast<char *>(p);
  device.erase(device.lower_bound(start), device.lower_bound(start + bytes));
  owner.erase(owner.lower_bound(start), owner.lower_bound(start + bytes));
  return CUDA_SUCCESS;
}
CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t) {
  return CUDA_SUCCESS;
}

// NVML, which torch asks what GPUs share: no fabric, and no link (3: not supported).
int nvmlInit_v2() { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *, void **device) {
  return *device = next_handle(), 0;
}
int nvmlDeviceGetGpuFabricInfoV(void *, void *) { return 0; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void *, unsigned, void *) { return 3; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *, unsigned, void *) { return 3; }
int nvmlDeviceGetComputeRunningProcesses(void *, unsigned *count, void *) { return *count = 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { return *version = CUDA_VERSION, 0; }

// cuBLAS; it ignores its arguments, so its header is not needed ----------------------

int cublasCreate_v2(void **h) { return *h = calloc(1, 4096), 0; }
int cublasGetMathMode(void *, int *mode) { return *mode = 0; }
int cublasGetPointerMode_v2(void *, int *mode) { return *mode = 0; }
size_t cublasLtGetVersion() { return 130000; }
int cublasLtCreate(void **h) { return *h = calloc(1, 4096), 0; }
int cublasLtMatmulDescCreate(void **h, ...) { return *h = calloc(1, 4096), 0; }
int cublasLtMatrixLayoutCreate(void **h, ...) { return *h = calloc(1, 4096), 0; }
int cublasLtMatmulPreferenceCreate(void **h) { return *h = calloc(1, 4096), 0; }
int cublasLtMatmulDescDestroy(void *h) { return free(h), 0; }
int cublasLtMatrixLayoutDestroy(void *h) { return free(h), 0; }
int cublasLtMatmulPreferenceDestroy(void *h) { return free(h), 0; }
// One algorithm is returned for every matrix product; the result struct has 96 bytes.
int cublasLtMatmulAlgoGetHeuristic(void *, void *, void *, void *, void *, void *, void *, int,
                                   void *result, int *found) {
  return memset(result, 0, 96), *found = 1, 0;
}

#define SUCCEEDS(name) \
  int name(...) { return 0; }
SUCCEEDS(cublasDestroy_v2)
SUCCEEDS(cublasSetStream_v2)
SUCCEEDS(cublasSetWorkspace_v2)
SUCCEEDS(cublasSetMathMode)
SUCCEEDS(cublasSetPointerMode_v2)
SUCCEEDS(cublasSgemm_v2)
SUCCEEDS(cublasDgemm_v2)
SUCCEEDS(cublasSgemmEx)
SUCCEEDS(cublasGemmEx)
SUCCEEDS(cublasGemmStridedBatchedEx)
SUCCEEDS(cublasSgemmStridedBatched)
SUCCEEDS(cublasDgemmStridedBatched)
SUCCEEDS(cublasSgemv_v2)
SUCCEEDS(cublasDgemv_v2)
SUCCEEDS(cublasStrsm_v2)
SUCCEEDS(cublasStrsmBatched)
SUCCEEDS(cublasSdot_v2)
SUCCEEDS(cublasDotEx)
SUCCEEDS(cublasLtMatmulDescSetAttribute)
SUCCEEDS(cublasLtMatrixLayoutSetAttribute)
SUCCEEDS(cublasLtMatmulPreferenceSetAttribute)
SUCCEEDS(cublasLtMatmul)
}

# The player for arm64 Linux, by Debian's g++-aarch64-linux-gnu; what is built runs under qemu. LAPILLI_ARM64_ROOT: a folder with arm64's
# C and C++ library, Vulkan loader and a driver (tools/test_arm64.sh makes it of Debian's packages).
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES LAPILLI_ARM64_ROOT)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64-static;-L;${LAPILLI_ARM64_ROOT})
list(APPEND CMAKE_FIND_ROOT_PATH ${LAPILLI_ARM64_ROOT})
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)

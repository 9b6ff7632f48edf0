/**
 * Lapilli for Java and Kotlin: compiled PyTorch models on any Vulkan device. See docs/android.md. The packages org.pytorch and
 * org.pytorch.executorch of lapilli-pytorch.jar have the names that applications of PyTorch Mobile and ExecuTorch use.
 */
package org.lapilli;

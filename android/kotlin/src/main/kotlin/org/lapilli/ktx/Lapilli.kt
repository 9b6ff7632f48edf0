/** What Kotlin says shorter than Java: default arguments, operators, values of arrays. Nothing here that org.lapilli cannot do. */
@file:JvmName("Lapilli")

package org.lapilli.ktx

import org.lapilli.Binding
import org.lapilli.Device
import org.lapilli.IValue
import org.lapilli.LlmModule
import org.lapilli.Module
import org.lapilli.Tensor
import org.lapilli.Verify

/** A module; close it with `use`. */
@JvmOverloads
fun loadModule(path: String, device: Device = Device.VULKAN, verify: Verify = Verify.STRUCTURE): Module =
    Module.load(path, device, verify)

/** The first result of the method "forward" for these tensors. */
operator fun Module.invoke(vararg inputs: Tensor): Tensor = results("forward", *inputs).first()

/** All results of a method. */
fun Module.results(method: String, vararg inputs: Tensor): List<Tensor> {
    val name = if (method == "forward" && method !in methods) methods.first() else method
    val result = runMethod(name, *Array(inputs.size) { IValue.from(inputs[it]) })
    return if (result.isTensor) listOf(result.toTensor()) else result.toTuple().map { it.toTensor() }
}

/** A tensor of these values; without a shape, of one dimension. */
fun FloatArray.toTensor(vararg shape: Long): Tensor = Tensor.fromBlob(this, shapeOf(shape, size))

fun IntArray.toTensor(vararg shape: Long): Tensor = Tensor.fromBlob(this, shapeOf(shape, size))

fun LongArray.toTensor(vararg shape: Long): Tensor = Tensor.fromBlob(this, shapeOf(shape, size))

private fun shapeOf(given: LongArray, size: Int) = if (given.isEmpty()) longArrayOf(size.toLong()) else given

/** The values of a tensor of floats. */
val Tensor.floats: FloatArray get() = dataAsFloatArray

/** Runs again and again on the same tensors, and gives each time what `read` makes of the results. */
inline fun <T> Module.bound(vararg inputs: Tensor, block: (Binding) -> T): T = bind(*inputs).use(block)

/** What the model writes after a prompt: seqLen tokens with the prompt at most. onPiece: false ends it. */
@JvmOverloads
fun LlmModule.write(
    prompt: String,
    seqLen: Int = LlmModule.DEFAULT_SEQ_LEN,
    onPiece: (String) -> Boolean = { true },
): String {
    val text = StringBuilder()
    generate(prompt, seqLen) { piece ->
        text.append(piece)
        if (!onPiece(piece)) stop()
    }
    return text.toString()
}
